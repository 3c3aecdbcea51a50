"""What every plan of the decode scheduler must obey, whatever the state it was made in."""

from collections.abc import Iterable, Mapping

from decode_node.scheduler import DecodeLimits
from pdserve.engine.batch import Batch
from pdserve.engine.sequence import Sequence


def check_victims(
    computing: list[Sequence], not_started: list[Sequence], *, still_not_started: list[Sequence]
) -> None:
    """Withdraw before preempting, youngest first.

    ``computing`` ran and ``not_started`` were reserved before the plan; which of them are over now
    made way. ``still_not_started`` are those that are reserved after it.
    """
    for group in (computing, not_started):
        latest = max((s.arrived_s for s in group if not s.over), default=0.0)
        assert all(s.arrived_s >= latest for s in group if s.over), "not the youngest"
    if any(s.over for s in computing):
        assert not still_not_started, "preempted before all was withdrawn"


def check_budgets(
    batch: Batch,
    sequences: Iterable[Sequence],
    budgeted: Mapping[Sequence, bool],
    limits: DecodeLimits,
) -> None:
    """The step's budgets. ``budgeted`` tells routed prompts from fallbacks."""
    assert batch.num_tokens <= limits.max_num_batched_tokens
    by_slot = {s.slot: s for s in sequences if s.slot is not None}
    routed: list[int] = []
    fallback: list[int] = []
    for chunk in batch.chunks:
        sequence = by_slot[chunk.slot]
        if chunk.start + chunk.length <= sequence.num_prompt:
            is_routed = budgeted[sequence] and limits.local_prefill_tokens
            (routed if is_routed else fallback).append(chunk.length)
    assert sum(routed) <= limits.local_prefill_tokens
    assert len(fallback) <= 1, "two fallbacks in one step"
    assert sum(fallback) <= limits.fallback_chunk
