"""What the engine's tests share: runners, batches, and greedy runs through them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.core.kv_layout import BlockId
from pdserve.core.model_spec import read_model_spec
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.parallel import SoloGroup, TpGroup
from pdserve.engine.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def engine_config(model_dir: Path, **changes) -> EngineConfig:
    """Small limits; float32 on one rank unless told otherwise."""
    settings: dict[str, Any] = {
        "model_dir": model_dir,
        "spec": read_model_spec(model_dir),
        "load_format": "auto",
        "device": "cpu",
        "dtype": "float32",
        "tp_size": 1,
        "tp_rank": 0,
        "block_size": 16,
        "kv_dtype": "float32",
        "kv_cache_bytes": 1 << 22,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 128,
        "num_threads": 1,  # the machine may be busy: OpenMP threads then wait for each other
    }
    return EngineConfig(**(settings | changes))


def make_runner(model_dir: Path, group: TpGroup | None = None, **changes) -> ModelRunner:
    return ModelRunner(engine_config(model_dir, **changes), group or SoloGroup())


def joined(slot: int, blocks: Sequence[int], prompt_len: int, **changes) -> Joined:
    settings: dict[str, Any] = {
        "slot": Slot(slot),
        "sampling": GREEDY,
        "choices": (0,),
        "end_token_ids": (),
        "prompt_len": prompt_len,
        "history": (),
        "blocks": tuple(map(BlockId, blocks)),
    }
    return Joined(**(settings | changes))


def chunk(slot: int, start: int, tokens: Sequence[int] | Carried, num_samples: int = 1) -> Chunk:
    held = tokens if isinstance(tokens, Carried) else tuple(tokens)
    return Chunk(slot=Slot(slot), start=start, tokens=held, new_blocks=(), num_samples=num_samples)


def greedy(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk_len: int = 1 << 20,
    first_step: int = 0,
    sampling_of: Sequence[SamplingParams] | None = None,
) -> list[list[int]]:
    """Continue all prompts together: prompts in chunks, then one token a step, by ``Carried``.

    Greedily, unless it is said how each samples. Blocks are dealt out interleaved, so that no
    sequence's blocks are neighbours.
    """
    step = first_step
    need = [runner.layout.num_blocks_for(len(p) + num_tokens) for p in prompts]
    blocks = [[b * len(prompts) + i for b in range(n)] for i, n in enumerate(need)]
    out: list[list[int]] = [[] for _ in prompts]
    ways = sampling_of or [GREEDY] * len(prompts)
    joins: tuple[Joined, ...] = tuple(
        joined(i, blocks[i], len(p), sampling=ways[i]) for i, p in enumerate(prompts)
    )
    for at in range(0, max(map(len, prompts)), chunk_len):
        live = [i for i, p in enumerate(prompts) if at < len(p)]
        parts = [(i, prompts[i][at : at + chunk_len]) for i in live]
        chunks = tuple(
            chunk(i, at, part, num_samples=int(at + len(part) == len(prompts[i])))
            for i, part in parts
        )
        output = runner.launch(Batch(step=step, joined=joins, chunks=chunks)).wait()
        sampling = [i for i, part in parts if at + len(part) == len(prompts[i])]
        for i, sampled in zip(sampling, output.sampled, strict=True):
            out[i].append(sampled.tokens[0])
        joins = ()
        step += 1
    for n in range(num_tokens - 1):
        chunks = tuple(chunk(i, len(p) + n, Carried()) for i, p in enumerate(prompts))
        output = runner.launch(Batch(step=step, chunks=chunks)).wait()
        for i, sampled in enumerate(output.sampled):
            out[i].append(sampled.tokens[0])
        step += 1
    runner.launch(Batch(step=step, left=tuple(Slot(i) for i in range(len(prompts)))))
    return out


def logprobs_after(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities ``[V]`` of the token after ``token_ids``, which run as one chunk."""
    vocab_size = runner.config.spec.vocab_size
    num_blocks = runner.layout.num_blocks_for(len(token_ids))
    sampling = replace(GREEDY, logprobs=vocab_size)
    joins = (joined(0, range(num_blocks), len(token_ids), sampling=sampling),)
    batch = Batch(step=0, joined=joins, chunks=(chunk(0, 0, token_ids),))
    (sampled,) = runner.launch(batch).wait().sampled
    runner.launch(Batch(step=1, left=(Slot(0),)))
    logprobs = torch.full((vocab_size,), torch.nan)
    for token_id, value in sampled.logprobs[0].top:
        logprobs[token_id] = value
    return logprobs
