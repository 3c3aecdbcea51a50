"""Attention over the paged KV cache, one Protocol for all devices and libraries."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pdserve.engine.kernels.interface import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The attention heads of one rank. Query head h reads KV head ``h // (num_heads //
    num_kv_heads)``.

    With a ``sliding_window`` w the token at position p attends to positions above ``p - w`` only.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads that read the same KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the chunks of one step lie: S chunks of T tokens in all, in the order of the tokens."""

    starts: tuple[int, ...]  # [S] position of each chunk's first token
    lengths: tuple[int, ...]  # [S]
    positions: Tensor  # [T] int64, on the device
    block_tables: Tensor  # [S, M] int32, on the device; entries beyond a chunk's end are any block

    def cells(self, owners: Tensor, block_size: int) -> Tensor:
        """``[T]`` int64: B times each token's block, plus its place in there. ``owners`` ``[T]``
        are the tokens' chunks.
        """
        blocks = self.block_tables[owners, self.positions // block_size].long()
        return blocks * block_size + self.positions % block_size


class AttentionBackend(Protocol):
    """``plan`` once per step, then ``run`` once per layer."""

    def plan(self, metadata: AttentionMetadata) -> None: ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        """Rotate q and k in place, write the step's K and V into their pages, then attend.

        q ``[T, Hq, D]``, k and v ``[T, Hkv, D]`` (rows may be strided) → ``[T, Hq * D]``. Each
        token attends to all cached positions up to its own.
        """


@runtime_checkable
class CapturableBackend(Protocol):
    """A backend whose decode steps a CUDA graph may hold: planned from tensors alone."""

    def plan_decodes(self, positions: Tensor, block_tables: Tensor) -> None:
        """As ``plan``, for one token at ``positions`` ``[S]`` of each of S sequences, whose tables
        are ``[S, M]``. What is read on the device now is read again at each replay.
        """


@runtime_checkable
class CapturableChunks(Protocol):
    """A backend that can do so for steps with longer chunks too, where ``captures_chunks``."""

    @property
    def captures_chunks(self) -> bool: ...

    def plan_chunks(
        self,
        ends: Tensor,
        context_lens: Tensor,
        owners: Tensor,
        positions: Tensor,
        block_tables: Tensor,
    ) -> None:
        """As ``plan``, for S chunks of T tokens in all, of which some may be empty.

        All int64 but the tables ``[S, M]``. ``ends`` ``[S]``: where a chunk ends among the step's
        tokens; ``context_lens`` ``[S]``: where in its sequence; ``owners`` and ``positions``
        ``[T]``: the chunk of each token, and where in its sequence it is.
        """


class DecodeBackend(AttentionBackend, CapturableBackend, Protocol):
    """For steps of one token of each sequence, inside graphs and outside."""
