"""What a sampler has on a GPU, in plain torch: so that it can run here, and as the oracle there."""

import struct

import torch
from torch import Tensor

from pdserve.core.request import SamplingParams
from pdserve.engine.noise import make_lanes, row_key
from pdserve.engine.sampling_race import NO_TOP_K, Lots, draw


class PlainRace:
    """A fast race that is the plain one."""

    def can_draw(self, sampling: SamplingParams) -> bool:
        return sampling.top_k is None or sampling.top_p >= 1

    def draw(self, logits: Tensor, lots: Lots) -> Tensor:
        lanes = make_lanes(logits.shape[1], logits.device)
        wants = [
            _sampling(top_k, *reals)
            for top_k, reals in zip(lots.whole[:, 3].tolist(), lots.real.tolist(), strict=True)
        ]
        keys = lots.whole[:, 1:3].contiguous().to(logits.device)
        return draw(logits[lots.whole[:, 0].tolist()].float(), keys, lanes, wants)


class PlainPick:
    """A pick that reads each line on the host. Counts its steps."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_steps = 0

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        table: Tensor,
        tokens: Tensor,
        kept: Tensor | None,
    ) -> None:
        self.num_steps += 1
        lanes = make_lanes(self._vocab_size, logits.device)
        if kept is not None:
            kept.copy_(logits)
        lines = table[slots].cpu().numpy()
        for row, (line, position) in enumerate(zip(lines, positions.tolist(), strict=True)):
            stream, top_k, temperature, *rest = struct.unpack("<qifff8x", line.tobytes())
            if temperature == 0:
                tokens[row] = logits[row].float().argmax()
                continue
            key = torch.tensor([row_key(stream, position)], dtype=torch.int32, device=logits.device)
            want = _sampling(top_k, temperature, *rest)
            tokens[row] = draw(logits[row : row + 1].float(), key, lanes, [want])[0]


def _sampling(top_k: int, temperature: float, top_p: float, min_p: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        top_k=None if top_k == NO_TOP_K else top_k,
        top_p=top_p,
        min_p=min_p,
    )
