"""Trial steps are steps that real ranks can run, and leave nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import Batch
from pdserve.engine.parallel import SoloGroup
from pdserve.engine.runner import ModelRunner
from pdserve.rank.inline import start_inline_ranks
from pdserve.rank.parts import RankParts
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import TrialLimits, measure_steps, trial_limits
from tests.fake_executor import FakeExecutor
from tests.fakes import FakeEndpoint
from tests.nodes.specs import make_spec
from tests.oracle import FakeModel
from tests.rank.tiny_llama import tiny_engine_config


class CheckedRanks:
    """Runs batches on executors that assert every rule; a batch without chunks ends a life."""

    def __init__(self, *, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_slots
        self.lives: list[list[Batch]] = [[]]

    def run(self, batch: Batch) -> None:
        self.lives[-1].append(batch)
        if not batch.chunks:
            self.lives.append([])

    def check(self) -> None:
        assert not self.lives.pop(), "the last life did not end"
        for *steps, last in self.lives:
            executor = FakeExecutor(
                FakeModel(97),
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                num_slots=self.num_slots,
            )
            for batch in steps:
                executor.submit(batch)
                executor.output()
            assert set(last.left) == {joined.slot for joined in steps[0].joined}


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize(
    ("chunk_len", "max_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks"),
    [
        (256, 1000, 32, 512, 200),
        (256, 300, 1, 256, 200),  # no second long chunk, no second slot
        (8, 1000, 32, 8, 200),  # steps shorter than the short prompt
        (512, 2000, 8, 512, 3),  # hardly any blocks
        (512, 3, 8, 512, 1),
        (1, 1, 1, 1, 1),
    ],
)
async def test_trials_keep_to_the_rules_of_batches(
    decodes: bool,
    chunk_len: int,
    max_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_blocks: int,
) -> None:
    checked = CheckedRanks(num_blocks=num_blocks, block_size=4, num_slots=max_num_seqs)
    limits = TrialLimits(
        chunk_len=chunk_len,
        max_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        decodes=decodes,
    )
    for batches in limits.trials(block_size=4, num_blocks=num_blocks):
        for batch in batches:
            assert batch.num_tokens <= max_num_batched_tokens
            assert all(c.start + c.length <= max_len for c in batch.chunks)
            assert all(BlockId(0) <= b < num_blocks for j in batch.joined for b in j.blocks)
            checked.run(batch)
    checked.check()


class BusyClock:
    """On a machine so busy that every look at the clock comes five seconds after the last."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 5.0
        return self._now_s


@pytest.mark.parametrize("clock", [MonotonicClock(), BusyClock()])
async def test_a_node_knows_its_costs_before_its_first_request(
    tmp_path: Path, clock: Clock
) -> None:
    @contextmanager
    def open_parts() -> Iterator[RankParts]:
        runner = ModelRunner(tiny_engine_config(tmp_path), SoloGroup())
        yield RankParts(runner, FakeEndpoint())

    ranks = await start_inline_ranks(open_parts, step_timeout_s=60)
    try:
        meter = StepMeter()
        limits = TrialLimits(
            chunk_len=32, max_len=128, max_num_seqs=8, max_num_batched_tokens=64, decodes=True
        )
        await measure_steps(ranks, limits, meter, clock)
    finally:
        await ranks.close()
    costs = meter.costs()
    assert costs.prefill is not None
    assert costs.decode is not None
    assert costs.prefill.chunk_s(32) > 0
    assert costs.decode.step_s(4, 100) > 0
    if isinstance(clock, BusyClock):  # a step of any length took five seconds, long ones too
        assert costs.prefill.chunk_s(32) == pytest.approx(5.0, rel=0.1)


def test_a_node_tries_chunks_of_the_length_that_it_will_run() -> None:
    assert trial_limits(make_spec("p0", PrefillConfig(max_num_batched_tokens=99))).chunk_len == 99
    pool = DecodeConfig(local_prefill_tokens=40)
    assert trial_limits(make_spec("d0", pool)).chunk_len == 40
    pure = DecodeConfig(local_prefill_tokens=0, fallback_chunk=24)
    assert trial_limits(make_spec("d0", pure)).chunk_len == 24
    assert trial_limits(make_spec("d0", pure)).decodes
