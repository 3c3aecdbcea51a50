"""Our engine as the benches drive it: batches as a node's loop would send them, without a node."""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.parallel import TpGroup
from pdserve.engine.pending_step import PendingStep
from pdserve.engine.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)

Part = tuple[Slot, int, tuple[int, ...]]  # of a prompt: from where, which tokens


class Runner:
    """One rank. Prompts have a slot and blocks each, by their number."""

    def __init__(self, config: EngineConfig, group: TpGroup, *, in_flight: int) -> None:
        self._runner = ModelRunner(config, group)
        self._in_flight = in_flight
        self._step = 0

    @property
    def kv_bytes(self) -> int:
        """The size of the KV cache."""
        return self._runner.num_blocks * self._runner.layout.block_stride_bytes

    def warm_up(self) -> None:
        """As a rank does before its first request."""
        self._runner.warm_up()

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
        """Continue each prompt by ``num_tokens``: seconds of the first step, then of the others."""
        times = [time.perf_counter()]
        self._start(prompts, num_tokens).wait()
        times.append(time.perf_counter())
        times += self._decode(prompts, range(num_tokens - 1))
        self._leave(len(prompts))
        return [end - begin for begin, end in itertools.pairwise(times)]

    def prompts_s(self, prompts: Sequence[Sequence[int]], tokens_per_step: int) -> float:
        """Seconds until each prompt has its first token, so many tokens a step."""
        start = time.perf_counter()
        pending: deque[PendingStep] = deque()
        for parts in _steps(prompts, tokens_per_step):
            joined = tuple(
                self._joined(slot, len(prompts[slot]), 1) for slot, begin, _ in parts if begin == 0
            )
            chunks = tuple(
                _chunk(slot, begin, tokens, is_last=begin + len(tokens) == len(prompts[slot]))
                for slot, begin, tokens in parts
            )
            pending.append(self._launch(joined=joined, chunks=chunks))
            if len(pending) == self._in_flight:
                pending.popleft().wait()
        for step in pending:
            step.wait()
        seconds = time.perf_counter() - start
        self._leave(len(prompts))
        return seconds

    def _start(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PendingStep:
        joined = tuple(
            self._joined(Slot(number), len(prompt), num_tokens)
            for number, prompt in enumerate(prompts)
        )
        chunks = tuple(
            _chunk(Slot(number), 0, tuple(prompt)) for number, prompt in enumerate(prompts)
        )
        return self._launch(joined=joined, chunks=chunks)

    def _decode(self, prompts: Sequence[Sequence[int]], indices: range) -> list[float]:
        """One token each for every index; when each step was seen to be done."""
        times = []
        pending: deque[PendingStep] = deque()
        for index in indices:
            chunks = tuple(
                _chunk(Slot(number), len(prompt) + index, Carried())
                for number, prompt in enumerate(prompts)
            )
            pending.append(self._launch(chunks=chunks))
            if len(pending) == self._in_flight:
                pending.popleft().wait()
                times.append(time.perf_counter())
        for step in pending:
            step.wait()
            times.append(time.perf_counter())
        return times

    def _leave(self, count: int) -> None:
        self._launch(left=tuple(map(Slot, range(count)))).wait()

    def _joined(self, slot: Slot, prompt_len: int, num_tokens: int) -> Joined:
        count = self._runner.layout.num_blocks_for(prompt_len + num_tokens)
        return Joined(
            slot=slot,
            sampling=GREEDY,
            choices=(0,),
            end_token_ids=(),
            prompt_len=prompt_len,
            history=(),
            blocks=tuple(map(BlockId, range(slot * count, (slot + 1) * count))),
        )

    def _launch(
        self,
        *,
        joined: tuple[Joined, ...] = (),
        left: tuple[Slot, ...] = (),
        chunks: tuple[Chunk, ...] = (),
    ) -> PendingStep:
        batch = Batch(step=self._step, joined=joined, left=left, chunks=chunks)
        self._step += 1
        return self._runner.launch(batch)


def _steps(prompts: Sequence[Sequence[int]], tokens_per_step: int) -> Iterator[list[Part]]:
    """All prompts in turn, cut where a step is full."""
    parts: list[Part] = []
    room = tokens_per_step
    for number, prompt in enumerate(prompts):
        begin = 0
        while begin < len(prompt):
            tokens = tuple(prompt[begin : begin + room])
            parts.append((Slot(number), begin, tokens))
            begin += len(tokens)
            room -= len(tokens)
            if not room:
                yield parts
                parts, room = [], tokens_per_step
    if parts:
        yield parts


def _chunk(
    slot: Slot, start: int, tokens: tuple[int, ...] | Carried, *, is_last: bool = True
) -> Chunk:
    return Chunk(slot=slot, start=start, tokens=tokens, new_blocks=(), num_samples=int(is_last))
