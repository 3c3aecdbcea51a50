"""Steps overlap on a GPU: a launch waits for nothing, a result only for its own step."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Slot
from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import GREEDY, chunk, joined, make_runner

pytestmark = pytest.mark.gpu

PROMPT = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(33)]
LONG = 4_000_000_000  # clock ticks that a busy GPU spins: about two seconds
WAYS = [
    GREEDY,
    replace(GREEDY, logprobs=3),
    SamplingParams(max_tokens=1 << 20, seed=5, top_p=0.9, top_k=40, frequency_penalty=0.5),
]


def keep_busy() -> torch.cuda.Event:
    """Queue work that takes long; the event is done when it is."""
    torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    return event


def test_neither_a_launch_nor_an_earlier_result_waits_for_a_busy_gpu(
    model_of: Callable[[str], Path],
) -> None:
    runner = make_runner(model_of("llama"), device="cuda:0", dtype="bfloat16", kv_dtype="bfloat16")
    slots = range(len(WAYS))
    joins = tuple(
        joined(
            slot,
            range(slot * 4, slot * 4 + 4),
            len(PROMPT),
            sampling=way,
            history=tuple(PROMPT) if way.needs_history else (),
        )
        for slot, way in enumerate(WAYS)
    )
    prompts = tuple(chunk(slot, 0, PROMPT) for slot in slots)
    decode = [tuple(chunk(slot, 33 + n, Carried()) for slot in slots) for n in range(4)]
    batches = [Batch(step=0, joined=joins, chunks=prompts)]
    batches += [Batch(step=1 + n, chunks=chunks) for n, chunks in enumerate(decode)]

    def run(*, overlapped: bool) -> list[tuple[int, ...]]:
        outputs = [runner.launch(batch).wait() for batch in batches[:2]]
        first = runner.launch(batches[2])
        busy = keep_busy() if overlapped else None
        pending = [runner.launch(batch) for batch in batches[3:]]
        outputs.append(first.wait())
        if busy is not None:
            assert not busy.query(), "a launch or a wait has waited for the busy GPU"
        outputs += [step.wait() for step in pending]
        runner.launch(Batch(step=5, left=tuple(map(Slot, slots))))
        return [s.tokens for output in outputs for s in output.sampled]

    expected = run(overlapped=False)  # and kernels are loaded
    assert run(overlapped=True) == expected


def test_steps_tell_what_they_took_of_the_gpus_time(model_of: Callable[[str], Path]) -> None:
    """From when it was free: what ran before does not count, what a step itself waits for does."""
    runner = make_runner(model_of("llama"), device="cuda:0")
    runner.warm_up()
    runner.launch(Batch(step=0, joined=(joined(0, range(4), len(PROMPT)),))).wait()
    began, busy = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    torch.cuda._sleep(LONG)
    busy.record()
    output = runner.launch(Batch(step=1, chunks=(chunk(0, 0, PROMPT),))).wait()
    busy_s = began.elapsed_time(busy) / 1e3
    assert output.device_s is not None
    assert 0 < output.device_s < busy_s / 2
    runner.launch(Batch(step=2, left=(Slot(0),)))


def test_a_step_that_samples_nothing_is_waited_for_too(model_of: Callable[[str], Path]) -> None:
    """Its KV may be sent as soon as it counts as done."""
    runner = make_runner(model_of("llama"), device="cuda:0")
    runner.warm_up()
    join = joined(0, range(4), len(PROMPT))
    runner.launch(Batch(step=0, joined=(join,))).wait()
    busy = keep_busy()
    step = runner.launch(Batch(step=1, chunks=(chunk(0, 0, PROMPT, num_samples=0),)))
    step.wait()
    assert busy.query()
    runner.launch(Batch(step=2, left=(Slot(0),)))
