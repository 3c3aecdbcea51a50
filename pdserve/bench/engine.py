"""``pdserve bench engine``: latency of prompts by length and of decode steps by batch size, on one
rank or, with ``--tensor-parallel-size``, on the ranks of one group.

Measures the model runner alone: no scheduler, no server. With ``--against transformers`` the same
work is done by Hugging Face ``generate`` in the same process, in turn, so that a busy machine slows
both. Decode is measured on prompts of 128 tokens and 33 tokens of output, unless told otherwise;
steps count after the first. With ``--in-flight 2`` a step is launched before the one before it is
waited for, as a node on a GPU does; a decode step's time is then that between two results.
``--prompts`` adds a row: so many prompts together, in steps of ``--step-tokens``.

On a GPU it also says what the first prompt of each length took after start, how long the GPU runs
no kernel between two decode steps, and what its memory is taken for.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path

import torch

from pdserve.bench.arguments import whole_number, whole_numbers
from pdserve.bench.engine_gpu import MemoryUse, MemoryWatch, gap_ms
from pdserve.bench.engine_ranks import rank_device, run_ranks
from pdserve.bench.engine_reference import Transformers
from pdserve.bench.engine_runner import Runner
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import ModelSpec, read_model_spec
from pdserve.engine.engine_config import DTYPES, LOAD_FORMATS, EngineConfig
from pdserve.engine.parallel import SoloGroup, TpGroup
from pdserve.models.fetch import locate

DECODE_PROMPT_LEN = 128
DECODE_NUM_TOKENS = 33
BLOCK_SIZE = 16
STEP_TOKENS = 8192
GAP_STEPS = 16
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The median of one kind of work; ``size`` is tokens of a prompt or sequences of a step."""

    what: str  # "prefill" or "decode"
    size: int
    ms: float
    reference_ms: float | None
    first_ms: float | None = None  # of the first prompt of this length after start
    gap_ms: float | None = None  # without a kernel between two steps

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
        if self.first_ms is not None:
            record["first_ms"] = round(self.first_ms, 3)
        if self.gap_ms is not None:
            record["gap_ms"] = round(self.gap_ms, 4)
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Many prompts together, until each has its first token; the median."""

    num_prompts: int
    prompt_len: int
    step_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_prompts * self.prompt_len / self.seconds

    def as_json(self) -> dict[str, object]:
        return {
            "what": "throughput",
            "prompts": self.num_prompts,
            "prompt_len": self.prompt_len,
            "step_tokens": self.step_tokens,
            "ms": round(self.seconds * 1e3, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }

    def row(self) -> str:
        """One line of the table."""
        size = f"{self.num_prompts}x{self.prompt_len}"
        return (
            f"{'prompts':10}{size:>8}{self.seconds * 1e3:>12.2f}"
            f"  {self.tokens_per_s:.0f} tokens/s in steps of {self.step_tokens}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench engine``."""
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="a known name, or a model directory"
    )
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--kv-dtype", choices=sorted(DTYPES), help="default: that of the model")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu, cuda:0, …")
    parser.add_argument(
        "--tensor-parallel-size", type=whole_number, default=1, help="on GPUs from --device on"
    )
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
    parser.add_argument("--prompts", type=whole_number, help="so many prompts together, one row")
    parser.add_argument("--prompt-len", type=whole_number, default=2048, help="tokens of each")
    parser.add_argument(
        "--step-tokens", type=whole_number, default=STEP_TOKENS, help="of them in one step"
    )
    parser.add_argument("--rounds", type=whole_number, default=5, help="medians of so many runs")
    parser.add_argument("--against", choices=["transformers"], help="measure this one too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure, print each result as soon as it is there; the exit status.

    With ``--json`` the rows go to stderr and one JSON object to stdout, at the end. Raises
    ConfigError for a device or a length that cannot be.
    """
    directory = locate(args.model)
    _check(args, read_model_spec(directory))
    size = args.tensor_parallel_size
    if size > 1:
        work = partial(_one_of_ranks, args, directory)
        return run_ranks(work, size=size, device=torch.device(args.device))
    _measure_all(args, directory, SoloGroup())
    return 0


def _one_of_ranks(args: argparse.Namespace, directory: Path, group: TpGroup) -> None:
    """All ranks do the same; the first one prints it."""
    is_first = group.rank == 0
    with (
        nullcontext() if is_first else redirect_stdout(StringIO()),
        nullcontext() if is_first else redirect_stderr(StringIO()),
    ):
        _measure_all(args, directory, group)


def _measure_all(args: argparse.Namespace, directory: Path, group: TpGroup) -> None:
    spec = read_model_spec(directory)
    config = _config(args, directory, spec, group)
    on_gpu = torch.device(args.device).type == "cuda"
    memory = MemoryWatch(torch.device(config.device)) if on_gpu else None
    ours = _started(config, group, args.in_flight, memory)
    reference = None
    if args.against:
        reference = Transformers(directory, dtype=DTYPES[args.dtype], device=args.device)
    rows = sys.stderr if args.json else sys.stdout
    print(header(with_reference=reference is not None, on_gpu=on_gpu), file=rows, flush=True)
    results: list[dict[str, object]] = []
    for kind, sizes in (("prefill", args.prefill_lens), ("decode", args.decode_batches)):
        for size in sizes:
            measured = _measure(kind, size, spec, ours, reference, args)
            results.append(measured.as_json())
            print(row(measured, on_gpu=on_gpu), file=rows, flush=True)
    if args.prompts is not None:
        throughput = _throughput(spec, ours, args)
        results.append(throughput.as_json())
        print(throughput.row(), file=rows, flush=True)
    use = memory.use(ours.kv_bytes) if memory is not None else None
    if use is not None:
        print(use.row(), file=rows, flush=True)
    if args.json:
        sys.stdout.write(_as_json(results, use) + "\n")


def _as_json(results: list[dict[str, object]], memory: MemoryUse | None) -> str:
    record: dict[str, object] = {"results": results}
    if memory is not None:
        record["memory"] = memory.as_json()
    return json.dumps(record)


def _started(
    config: EngineConfig, group: TpGroup, in_flight: int, memory: MemoryWatch | None
) -> Runner:
    runner = Runner(config, group, in_flight=in_flight)
    if memory is not None:
        memory.made()
    runner.warm_up()
    if memory is not None:
        memory.warm()
    return runner


def header(*, with_reference: bool, on_gpu: bool = False) -> str:
    """The names of the columns of ``row``."""
    line = f"{'what':10}{'size':>8}{'ms':>12}"
    if on_gpu:
        line += f"{'first':>12}{'gap':>8}"
    return line + f"{'reference':>12}{'ratio':>8}" if with_reference else line


def row(result: Measured, *, on_gpu: bool = False) -> str:
    """One result in columns; those of the reference only where it was measured."""
    line = f"{result.what:10}{result.size:>8}{result.ms:>12.2f}"
    if on_gpu:
        line += f"{_figure(result.first_ms, 2):>12}{_figure(result.gap_ms, 3):>8}"
    if result.reference_ms is not None and result.ratio is not None:
        line += f"{result.reference_ms:>12.2f}{result.ratio:>8.2f}"
    return line


def _figure(ms: float | None, digits: int) -> str:
    return "-" if ms is None else f"{ms:.{digits}f}"


def _check(args: argparse.Namespace, spec: ModelSpec) -> None:
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device: {args.device!r}, but torch finds no CUDA device here")
    if args.tensor_parallel_size > 1 and args.against:
        raise ConfigError(
            f"--tensor-parallel-size: {args.tensor_parallel_size} with --against; transformers "
            "runs beside one rank only"
        )
    decode_len = args.decode_prompt_len + args.decode_tokens
    lengths = [("--prefill-lens", size + 1) for size in args.prefill_lens]
    if args.decode_batches:
        lengths.append(("--decode-prompt-len and --decode-tokens", decode_len))
    if args.prompts is not None:
        lengths.append(("--prompt-len", args.prompt_len + 1))
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
    prompts = _prompts(spec, batch, length)
    engines: list[Callable[[list[list[int]], int], list[float]]] = [ours.seconds]
    if reference is not None:
        engines.append(reference.seconds)
    figures: list[list[float]] = [[] for _ in engines]
    first_s: list[float] = []
    for number in range(args.rounds + 1):
        for engine, kept in zip(engines, figures, strict=True):
            seconds = engine(prompts, num_tokens)
            first_s.append(seconds[0])
            if number > 0:
                kept.append(statistics.mean(seconds[1:] or seconds) * 1e3)
    medians = [statistics.median(kept) for kept in figures]
    on_gpu = torch.device(args.device).type == "cuda"
    is_decode = kind == "decode"
    steps = partial(ours.seconds, prompts, min(num_tokens, GAP_STEPS))
    return Measured(
        what=kind,
        size=size,
        ms=medians[0],
        reference_ms=medians[1] if reference is not None else None,
        first_ms=first_s[0] * 1e3 if on_gpu and not is_decode else None,
        gap_ms=gap_ms(steps) if on_gpu and is_decode else None,
    )


def _throughput(spec: ModelSpec, ours: Runner, args: argparse.Namespace) -> Throughput:
    prompts = _prompts(spec, args.prompts, args.prompt_len)
    seconds = [ours.prompts_s(prompts, args.step_tokens) for _ in range(args.rounds + 1)]
    return Throughput(
        num_prompts=args.prompts,
        prompt_len=args.prompt_len,
        step_tokens=args.step_tokens,
        seconds=statistics.median(seconds[1:]),
    )


def _prompts(spec: ModelSpec, count: int, length: int) -> list[list[int]]:
    draw = random.Random(SEED)
    return [[draw.randrange(spec.vocab_size) for _ in range(length)] for _ in range(count)]


def _config(
    args: argparse.Namespace, directory: Path, spec: ModelSpec, group: TpGroup
) -> EngineConfig:
    decode_len = args.decode_prompt_len + args.decode_tokens
    longest = max((*args.prefill_lens, decode_len)) + 1
    widest = max((*args.decode_batches, 1))
    num_tokens = max(longest, widest * (decode_len + BLOCK_SIZE))
    if args.prompts is not None:
        longest = max(longest, args.prompt_len + 1)
        widest = max(widest, args.prompts)
        num_tokens = max(num_tokens, longest, args.prompts * (args.prompt_len + BLOCK_SIZE))
    settings = EngineConfig(
        model_dir=directory,
        spec=spec,
        load_format=args.load_format,
        device=str(rank_device(torch.device(args.device), group.rank)),
        dtype=args.dtype,
        tp_size=group.size,
        tp_rank=group.rank,
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
