"""``pdserve bench engine``: latency of prompts by length and of decode steps by batch size, one
rank.

Measures the model runner alone: no scheduler, no server. With ``--against transformers`` the same
work is done by Hugging Face ``generate`` in the same process, in turn, so that a busy machine slows
both. Decode is measured on prompts of 128 tokens and 33 tokens of output, unless told otherwise;
steps count after the first. With ``--in-flight 2`` a step is launched before the one before it is
waited for, as a node on a GPU does; a decode step's time is then that between two results.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pdserve.bench.arguments import whole_number, whole_numbers
from pdserve.bench.engine_reference import Transformers
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import BlockId
from pdserve.core.model_spec import ModelSpec, read_model_spec
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.engine.engine_config import DTYPES, LOAD_FORMATS, EngineConfig
from pdserve.engine.parallel import SoloGroup
from pdserve.engine.runner import ModelRunner, PendingStep
from pdserve.models.fetch import locate

DECODE_PROMPT_LEN = 128
DECODE_NUM_TOKENS = 33
BLOCK_SIZE = 16
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The median of one kind of work; ``size`` is tokens of a prompt or sequences of a step."""

    what: str  # "prefill" or "decode"
    size: int
    ms: float
    reference_ms: float | None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the reference."""
        return None if self.reference_ms is None else self.reference_ms / self.ms

    def as_json(self) -> dict[str, object]:
        size_name = "tokens" if self.what == "prefill" else "batch"
        record: dict[str, object] = {
            "what": self.what,
            size_name: self.size,
            "ms": round(self.ms, 3),
        }
        if self.reference_ms is not None and self.ratio is not None:
            record["reference_ms"] = round(self.reference_ms, 3)
            record["ratio"] = round(self.ratio, 3)
        return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench engine``."""
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a known name, or a model directory"
    )
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--kv-dtype", choices=sorted(DTYPES), help="default: that of the model")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu, cuda:0, …")
    parser.add_argument("--threads", type=whole_number, help="CPU threads; default: all cores")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument(
        "--prefill-lens", type=whole_numbers, default=(128, 512, 2048), metavar="N,…"
    )
    parser.add_argument("--decode-batches", type=whole_numbers, default=(1, 8, 32), metavar="N,…")
    parser.add_argument("--decode-prompt-len", type=whole_number, default=DECODE_PROMPT_LEN)
    parser.add_argument("--decode-tokens", type=whole_number, default=DECODE_NUM_TOKENS)
    parser.add_argument("--in-flight", type=whole_number, default=1, help="steps launched ahead")
    parser.add_argument("--rounds", type=whole_number, default=5, help="medians of so many runs")
    parser.add_argument("--against", choices=["transformers"], help="measure this one too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure, print each result as soon as it is there; the exit status.

    With ``--json`` the rows go to stderr and one JSON object to stdout, at the end. Raises
    ConfigError for a device or a length that cannot be.
    """
    directory = locate(args.model)
    spec = read_model_spec(directory)
    _check(args, spec)
    ours = Runner(_config(args, directory, spec), in_flight=args.in_flight)
    reference = None
    if args.against:
        reference = Transformers(directory, dtype=DTYPES[args.dtype], device=args.device)
    rows = sys.stderr if args.json else sys.stdout
    print(header(with_reference=reference is not None), file=rows, flush=True)
    results = []
    for kind, sizes in (("prefill", args.prefill_lens), ("decode", args.decode_batches)):
        for size in sizes:
            results.append(_measure(kind, size, spec, ours, reference, args))
            print(row(results[-1]), file=rows, flush=True)
    if args.json:
        sys.stdout.write(json.dumps({"results": [result.as_json() for result in results]}) + "\n")
    return 0


class Runner:
    """Our engine, driven by batches as a node's loop would."""

    def __init__(self, config: EngineConfig, *, in_flight: int) -> None:
        self._runner = ModelRunner(config, SoloGroup())
        self._runner.warm_up()
        self._in_flight = in_flight
        self._step = 0

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
        """Continue each prompt by ``num_tokens``: seconds of the first step, then of the others."""
        length = len(prompts[0]) + num_tokens
        per_prompt = self._runner.layout.num_blocks_for(length)
        slots = [Slot(i) for i in range(len(prompts))]
        joined = tuple(
            _joined(slot, len(prompts[slot]), range(slot * per_prompt, (slot + 1) * per_prompt))
            for slot in slots
        )
        chunks = tuple(_chunk(slot, 0, tuple(prompts[slot])) for slot in slots)
        start = time.perf_counter()
        self._launch(joined=joined, chunks=chunks).wait()
        times = [start, time.perf_counter()]
        pending: deque[PendingStep] = deque()
        for index in range(num_tokens - 1):
            chunks = tuple(_chunk(s, len(prompts[s]) + index, Carried()) for s in slots)
            pending.append(self._launch(chunks=chunks))
            if len(pending) == self._in_flight:
                pending.popleft().wait()
                times.append(time.perf_counter())
        for step in pending:
            step.wait()
            times.append(time.perf_counter())
        self._launch(left=tuple(slots)).wait()
        return [end - begin for begin, end in itertools.pairwise(times)]

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


def header(*, with_reference: bool) -> str:
    """The names of the columns of ``row``."""
    line = f"{'what':10}{'size':>8}{'ms':>12}"
    return line + f"{'reference':>12}{'ratio':>8}" if with_reference else line


def row(result: Measured) -> str:
    """One result in columns; those of the reference only where it was measured."""
    line = f"{result.what:10}{result.size:>8}{result.ms:>12.2f}"
    if result.reference_ms is not None and result.ratio is not None:
        line += f"{result.reference_ms:>12.2f}{result.ratio:>8.2f}"
    return line


def _check(args: argparse.Namespace, spec: ModelSpec) -> None:
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device: {args.device!r}, but torch finds no CUDA device here")
    decode_len = args.decode_prompt_len + args.decode_tokens
    lengths = [("--prefill-lens", size + 1) for size in args.prefill_lens]
    if args.decode_batches:
        lengths.append(("--decode-prompt-len and --decode-tokens", decode_len))
    for option, length in lengths:
        if length > spec.max_position:
            raise ConfigError(
                f"{option}: {length} positions, prompt and output, where {args.model} has "
                f"{spec.max_position}"
            )


def _measure(
    kind: str,
    size: int,
    spec: ModelSpec,
    ours: Runner,
    reference: Transformers | None,
    args: argparse.Namespace,
) -> Measured:
    """Both in turn, ``rounds`` times after one that does not count."""
    length, batch, num_tokens = (
        (size, 1, 1) if kind == "prefill" else (args.decode_prompt_len, size, args.decode_tokens)
    )
    draw = random.Random(SEED)
    prompts = [[draw.randrange(spec.vocab_size) for _ in range(length)] for _ in range(batch)]
    engines: list[Callable[[list[list[int]], int], list[float]]] = [ours.seconds]
    if reference is not None:
        engines.append(reference.seconds)
    figures: list[list[float]] = [[] for _ in engines]
    for number in range(args.rounds + 1):
        for engine, kept in zip(engines, figures, strict=True):
            seconds = engine(prompts, num_tokens)
            if number > 0:
                kept.append(statistics.mean(seconds[1:] or seconds) * 1e3)
    medians = [statistics.median(kept) for kept in figures]
    return Measured(
        what=kind,
        size=size,
        ms=medians[0],
        reference_ms=medians[1] if reference is not None else None,
    )


def _config(args: argparse.Namespace, directory: Path, spec: ModelSpec) -> EngineConfig:
    decode_len = args.decode_prompt_len + args.decode_tokens
    longest = max((*args.prefill_lens, decode_len)) + 1
    widest = max((*args.decode_batches, 1))
    num_tokens = max(longest, widest * (decode_len + BLOCK_SIZE))
    settings = EngineConfig(
        model_dir=directory,
        spec=spec,
        load_format=args.load_format,
        device=args.device,
        dtype=args.dtype,
        tp_size=1,
        tp_rank=0,
        block_size=BLOCK_SIZE,
        kv_dtype=args.kv_dtype or args.dtype,
        kv_cache_bytes=0,
        max_num_seqs=widest,
        max_num_batched_tokens=num_tokens,
        max_model_len=longest,
        num_threads=args.threads or torch.get_num_threads(),
        attention_backend=args.attention_backend,
        seed=SEED,
    )
    num_blocks = settings.layout.num_blocks_for(num_tokens) + widest
    return replace(settings, kv_cache_bytes=num_blocks * settings.layout.block_stride_bytes)


def _joined(slot: Slot, prompt_len: int, blocks: range) -> Joined:
    return Joined(
        slot=slot,
        sampling=SamplingParams(max_tokens=1 << 20, temperature=0.0),
        choices=(0,),
        end_token_ids=(),
        prompt_len=prompt_len,
        history=(),
        blocks=tuple(map(BlockId, blocks)),
    )


def _chunk(slot: Slot, start: int, tokens: tuple[int, ...] | Carried) -> Chunk:
    return Chunk(slot=slot, start=start, tokens=tokens, new_blocks=(), num_samples=1)


def _device(text: str) -> str:
    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    if kind not in {"cpu", "cuda"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def main() -> int:
    """``python -m pdserve.bench.engine``."""
    parser = argparse.ArgumentParser(prog="pdserve bench engine", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
