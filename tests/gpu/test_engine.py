"""The engine on one GPU computes what transformers and our own CPU engine compute."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.kv_layout import BlockId
from pdserve.core.model_spec import read_model_spec
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, BlockCopy, Carried, Slot
from pdserve.engine.noise import make_lanes, noise, noise_bits, row_key, stream_of
from pdserve.engine.runner import ModelRunner
from tests.engine.families import FAMILIES, VOCAB_SIZE, reference_greedy, reference_logprobs
from tests.engine.runs import GREEDY, chunk, greedy, joined, logprobs_after, make_runner

pytestmark = pytest.mark.gpu

ModelOf = Callable[[str], Path]
GPU = "cuda:0"
PROMPTS = [[random.Random(n).randrange(VOCAB_SIZE) for _ in range(n)] for n in (33, 1, 50, 16)]
BACKENDS = [("sdpa", "torch"), ("auto", "auto")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("backend", "kernels"), BACKENDS)
def test_float32_is_transformers(
    family: str, backend: str, kernels: str, model_of: ModelOf
) -> None:
    runner = make_runner(model_of(family), device=GPU, attention_backend=backend, kernels=kernels)
    expected = reference_logprobs(model_of(family), PROMPTS[2])
    torch.testing.assert_close(logprobs_after(runner, PROMPTS[2]), expected, atol=5e-5, rtol=1e-5)
    assert greedy(runner, PROMPTS, 6) == reference_greedy(model_of(family), PROMPTS, 6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral_window", "one_kv_head"])
@pytest.mark.parametrize(("backend", "kernels"), BACKENDS)
def test_bfloat16_is_near_float32(
    family: str, backend: str, kernels: str, model_of: ModelOf
) -> None:
    runner = make_runner(
        model_of(family),
        device=GPU,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        attention_backend=backend,
        kernels=kernels,
    )
    expected = reference_logprobs(model_of(family), PROMPTS[2])
    difference = logprobs_after(runner, PROMPTS[2]) - expected
    assert difference.abs().max() < 0.15  # one rounding is 0.4 %, logits reach 4
    assert difference.abs().max() > 0  # it was 16-bit arithmetic


@pytest.mark.parametrize("chunk_len", [1, 7, 16, 40])
@pytest.mark.parametrize("block_size", [5, 16, 128])
def test_chunks_of_any_length_give_the_tokens_of_the_whole(
    chunk_len: int, block_size: int, model_of: ModelOf
) -> None:
    runner = make_runner(model_of("llama"), device=GPU, block_size=block_size)
    expected = reference_greedy(model_of("llama"), PROMPTS, 5)
    assert greedy(runner, PROMPTS, 5, chunk_len=chunk_len) == expected


def sampled_tokens(
    runner: ModelRunner, sampling: Sequence[SamplingParams], num_tokens: int
) -> list[list[int]]:
    """Continue a prompt under each of ``sampling`` in one batch, histories kept by the rank."""
    joins = tuple(
        joined(
            slot,
            range(slot * 8, slot * 8 + 8),
            len(PROMPTS[0]),
            sampling=params,
            end_token_ids=(2,),
            history=tuple(PROMPTS[0]) if params.needs_history else (),
        )
        for slot, params in enumerate(sampling)
    )
    slots = range(len(sampling))
    first = tuple(chunk(slot, 0, PROMPTS[0]) for slot in slots)
    outputs = [runner.launch(Batch(step=0, joined=joins, chunks=first)).wait()]
    for step in range(1, num_tokens):
        start = len(PROMPTS[0]) + step - 1
        chunks = tuple(chunk(slot, start, Carried()) for slot in slots)
        outputs.append(runner.launch(Batch(step=step, chunks=chunks)).wait())
    runner.launch(Batch(step=num_tokens, left=tuple(map(Slot, slots))))
    return [[output.sampled[slot].tokens[0] for output in outputs] for slot in slots]


DRAWN = SamplingParams(max_tokens=1 << 20, temperature=1.2, seed=3)
WAYS = [
    DRAWN,
    replace(DRAWN, seed=(1 << 62) + 5, top_k=20),
    replace(DRAWN, top_p=0.7),
    replace(DRAWN, min_p=0.05, seed=9),
    replace(DRAWN, top_k=50, top_p=0.9, min_p=0.01, seed=4),
    replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.4),
    replace(DRAWN, frequency_penalty=1.1, repetition_penalty=0.8, top_p=0.95),
    replace(DRAWN, logit_bias=((7, 4.0), (11, -100.0)), min_tokens=4),
]
PICKED = [*WAYS[:4], GREEDY]


@pytest.mark.parametrize("ways", [WAYS, PICKED], ids=["all ways", "what is picked"])
@pytest.mark.parametrize("warm", [False, True], ids=["by itself", "in graphs"])
def test_the_device_samples_what_the_cpu_samples(
    warm: bool, ways: Sequence[SamplingParams], model_of: ModelOf
) -> None:
    on_cpu = make_runner(model_of("llama"), attention_backend="sdpa", kernels="torch")
    on_gpu = make_runner(model_of("llama"), device=GPU)
    if warm:
        on_gpu.warm_up()
    assert sampled_tokens(on_gpu, ways, 40) == sampled_tokens(on_cpu, ways, 40)


def test_noise_bits_are_the_same_and_noise_nearly() -> None:
    keys = torch.tensor([row_key(stream_of(seed, 1), 7 * seed) for seed in range(50)])
    keys = keys.to(torch.int32)
    cpu, gpu = torch.device("cpu"), torch.device(GPU)
    lanes, lanes_there = make_lanes(50_000, cpu), make_lanes(50_000, gpu)
    assert torch.equal(noise_bits(keys.to(gpu), lanes_there).cpu(), noise_bits(keys, lanes))
    torch.testing.assert_close(
        noise(keys.to(gpu), lanes_there).cpu(), noise(keys, lanes), rtol=3e-7, atol=0
    )


def test_several_choices_fork_one_prompt(model_of: ModelOf) -> None:
    """The first tokens of n choices, then each goes on in a slot of its own with a copied block."""
    prompt, n = PROMPTS[0], 3  # two full blocks and one token
    sampling = replace(DRAWN, temperature=2.0)

    def run(runner: ModelRunner) -> list[tuple[int, ...]]:
        join = joined(0, [0, 1, 2], len(prompt), sampling=sampling, choices=(0, 1, 2))
        step = Batch(step=0, joined=(join,), chunks=(chunk(0, 0, prompt, num_samples=n),))
        firsts = runner.launch(step).wait().sampled[0].tokens
        copies = tuple(
            BlockCopy(source=BlockId(2), destination=BlockId(9 + choice)) for choice in range(n)
        )
        forks = tuple(
            joined(choice, [0, 1, 9 + choice], len(prompt), sampling=sampling, choices=(choice,))
            for choice in range(n)
        )
        chunks = tuple(chunk(choice, len(prompt), [firsts[choice]]) for choice in range(n))
        step = Batch(step=1, left=(Slot(0),), joined=forks, copies=copies, chunks=chunks)
        out = [firsts, tuple(s.tokens[0] for s in runner.launch(step).wait().sampled)]
        for number in range(2, 8):
            start = len(prompt) + number - 1
            chunks = tuple(chunk(choice, start, Carried()) for choice in range(n))
            output = runner.launch(Batch(step=number, chunks=chunks)).wait()
            out.append(tuple(s.tokens[0] for s in output.sampled))
        return out

    on_cpu = run(make_runner(model_of("llama")))
    on_gpu = make_runner(model_of("llama"), device=GPU)
    on_gpu.warm_up()
    assert run(on_gpu) == on_cpu
    assert len(set(zip(*on_cpu, strict=True))) == n  # the choices differ


@pytest.mark.usefixtures("others_leave_memory")
@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize(("dtype", "backend"), [("float32", "sdpa"), ("bfloat16", "auto")])
def test_blocks_beyond_two_to_the_31_elements(dtype: str, backend: str, model_of: ModelOf) -> None:
    """The same prompt in the first and in the last blocks of a cache of more elements than that."""
    size = {"float32": 4, "bfloat16": 2}[dtype]
    runner = make_runner(
        model_of("llama"),
        device=GPU,
        dtype=dtype,
        kv_dtype=dtype,
        attention_backend=backend,
        kv_cache_bytes=size * ((1 << 31) + (1 << 24)),
    )
    last = runner.num_blocks - 1
    assert runner.kv.tensor[last - 4].storage_offset() > 1 << 31
    found = []
    for table in ([0, 1, 2], [last, last - 4, last - 2]):
        sampling = replace(GREEDY, logprobs=VOCAB_SIZE)
        join = joined(0, table, 33, sampling=sampling)
        steps = [
            Batch(step=0, joined=(join,), chunks=(chunk(0, 0, PROMPTS[0][:20], num_samples=0),)),
            Batch(step=1, chunks=(chunk(0, 20, PROMPTS[0][20:]),)),
            Batch(step=2, chunks=(chunk(0, 33, Carried()),)),
            Batch(step=3, left=(Slot(0),)),
        ]
        found.append([runner.launch(step).wait().sampled for step in steps])
    assert found[0] == found[1]
    assert torch.equal(runner.kv.tensor[last], runner.kv.tensor[0])
    runner.kv.copy_blocks([BlockCopy(source=BlockId(last), destination=BlockId(last - 1))])
    assert torch.equal(runner.kv.tensor[last - 1], runner.kv.tensor[0])


def test_dummy_weights_make_a_sane_model(model_of: ModelOf) -> None:
    runner = make_runner(model_of("qwen2"), device=GPU, load_format="dummy", dtype="bfloat16")
    logprobs = logprobs_after(runner, PROMPTS[0])
    assert logprobs.isfinite().all()
    assert logprobs.exp().max() < 0.9


@pytest.mark.usefixtures("others_leave_memory")
@pytest.mark.timeout(120, func_only=True)
def test_kv_blocks_take_what_the_largest_steps_leave(model_of: ModelOf) -> None:
    spec = replace(read_model_spec(model_of("llama")), max_position=4096)
    device = torch.device(GPU)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used_before = total - free  # by others too
    runner = make_runner(
        model_of("llama"),
        spec=spec,
        device=GPU,
        kv_cache_bytes=0,
        gpu_memory_utilization=0.3,
        max_model_len=4096,
        max_num_batched_tokens=8192,
    )
    runner.warm_up()
    held = runner.num_blocks * runner.layout.block_stride_bytes
    assert 0.2 * total < held + used_before < 0.3 * total
    assert greedy(runner, PROMPTS, 5) == reference_greedy(model_of("llama"), PROMPTS, 5)
