"""What following a grammar costs of a decode step, without a server: masks, and using them.

Each part is timed by itself and in turn with the steps, so that a busy machine slows all alike:
the mask (worked out between two steps, beside the ranks) and its use by the sampler.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from pdserve.bench.engine_runner import Runner
from pdserve.bench.structured.schemas import make_schema
from pdserve.core.model_spec import ModelSpec
from pdserve.core.request import Grammar, GrammarKind, SamplingParams
from pdserve.engine.batch import Joined, Slot
from pdserve.engine.sampler import Sampler, SampleRow
from pdserve.text.grammar import GrammarCompiler, Matcher, TokenMask, allows
from pdserve.text.tokenizer import Tokenizer

Result = TypeVar("Result")

PROMPT_LEN = 128
NUM_STEPS = 8
MAX_ANSWER = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarCosts:
    """Milliseconds: medians, but ``mask_p99_ms``. ``mask_ms`` is for one token of one answer."""

    load_ms: float  # of the model's vocabulary, once at a node's start
    compile_ms: float  # a new grammar with its first mask
    known_ms: float  # one that was compiled before
    mask_ms: float
    mask_p99_ms: float
    apply_ms: float  # what masks add to sampling, for one sequence
    step_ms: float  # a decode step of one sequence, without a grammar

    @property
    def share_of_step(self) -> float:
        """Of a decode step of one sequence, what its grammar adds for each token."""
        return (self.mask_ms + self.apply_ms) / self.step_ms


def measure(
    directory: Path, spec: ModelSpec, runner: Runner, *, rounds: int, seed: int
) -> GrammarCosts:
    """Walk through ``rounds`` answers of drawn schemas, token by token, beside decode steps."""
    draw = random.Random(seed)
    tokenizer = Tokenizer(directory)
    load_s, compiler = _timed(
        lambda: GrammarCompiler(
            tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids
        )
    )
    compiles, copies, masks, applies, steps = (list[float]() for _ in range(5))
    for number in range(rounds + 1):
        text = json.dumps(make_schema(draw))
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text, field="response_format")
        compile_s, (matcher, mask) = _timed(partial(_compiled, compiler, grammar))
        copy_s, matcher = _timed(matcher.copy)
        mask_times = _walk(matcher, mask, draw)
        step_times = _steps(runner, spec, draw)
        apply_s = _apply_s(spec.vocab_size, mask)
        if number > 0:  # the first round warms up
            compiles.append(compile_s)
            copies.append(copy_s)
            masks += mask_times
            applies.append(apply_s)
            steps += step_times
    return GrammarCosts(
        load_ms=load_s * 1e3,
        compile_ms=statistics.median(compiles) * 1e3,
        known_ms=statistics.median(copies) * 1e3,
        mask_ms=statistics.mean(masks) * 1e3,
        mask_p99_ms=statistics.quantiles(masks, n=100)[-1] * 1e3,
        apply_ms=statistics.median(applies) * 1e3,
        step_ms=statistics.median(steps) * 1e3,
    )


def _compiled(compiler: GrammarCompiler, grammar: Grammar) -> tuple[Matcher, TokenMask]:
    matcher = compiler.compile(grammar)
    return matcher, matcher.mask()


def _walk(matcher: Matcher, mask: TokenMask, draw: random.Random) -> list[float]:
    """Seconds of each token of an answer that is drawn at random: taking it in, the next mask."""
    times = []
    for _ in range(MAX_ANSWER):
        token_id = _draw(mask, draw)
        began_s = time.perf_counter()
        matcher.advance([token_id])
        if matcher.is_complete:
            break
        mask = matcher.mask()
        times.append(time.perf_counter() - began_s)
    return times


def _draw(mask: TokenMask, draw: random.Random) -> int:
    """Some token that the mask allows."""
    place = draw.choice([i for i, bits in enumerate(mask) if bits])
    return draw.choice([i for i in range(8 * place, 8 * place + 8) if allows(mask, i)])


def _steps(runner: Runner, spec: ModelSpec, draw: random.Random) -> list[float]:
    prompt = [draw.randrange(spec.vocab_size) for _ in range(PROMPT_LEN)]
    return runner.seconds([prompt], NUM_STEPS + 1)[1:]


def _apply_s(vocab_size: int, mask: TokenMask) -> float:
    """What the mask adds to sampling one row."""
    sampler = Sampler(max_num_seqs=1, vocab_size=vocab_size, device=torch.device("cpu"))
    sampling = SamplingParams(max_tokens=1, temperature=0.7)
    sampler.join(
        Joined(
            slot=Slot(0),
            sampling=sampling,
            choices=(0,),
            end_token_ids=(),
            prompt_len=1,
            history=(),
            blocks=(),
        )
    )
    logits = torch.randn((1, vocab_size))
    rows = [SampleRow(slot=Slot(0), choice=0, position=1)]
    with torch.inference_mode():
        without = [_timed(lambda: sampler.sample(logits, rows))[0] for _ in range(NUM_STEPS)]
        masked = [
            _timed(lambda: sampler.sample(logits, rows, {Slot(0): mask}))[0]
            for _ in range(NUM_STEPS)
        ]
    return max(0.0, statistics.median(masked) - statistics.median(without))


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    began_s = time.perf_counter()
    result = work()
    return time.perf_counter() - began_s, result
