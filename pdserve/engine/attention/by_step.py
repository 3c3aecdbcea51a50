"""Two backends as one: decode steps to one of them, steps with longer chunks to the other."""

from torch import Tensor

from pdserve.engine.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    CapturableChunks,
    DecodeBackend,
)
from pdserve.engine.kernels.interface import Rope


class ByStep:
    """``decodes`` takes the steps that have one token of each sequence, ``others`` the rest."""

    def __init__(self, decodes: DecodeBackend, others: AttentionBackend) -> None:
        self._decodes = decodes
        self._others = others
        self._planned = others

    def plan(self, metadata: AttentionMetadata) -> None:
        is_decode = all(length == 1 for length in metadata.lengths)
        self._planned = self._decodes if is_decode else self._others
        self._planned.plan(metadata)

    def plan_decodes(self, positions: Tensor, block_tables: Tensor) -> None:
        self._planned = self._decodes
        self._decodes.plan_decodes(positions, block_tables)

    @property
    def captures_chunks(self) -> bool:
        return isinstance(self._others, CapturableChunks)

    def plan_chunks(
        self,
        ends: Tensor,
        context_lens: Tensor,
        owners: Tensor,
        positions: Tensor,
        block_tables: Tensor,
    ) -> None:
        assert isinstance(self._others, CapturableChunks)
        self._planned = self._others
        self._others.plan_chunks(ends, context_lens, owners, positions, block_tables)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        return self._planned.run(layer, q, k, v, rope)
