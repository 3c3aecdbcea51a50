"""The whole system against an independent implementation: `make accept`.

Serves the small model in float32 for every transport, TP pairing (prefill, decode) and prefill
step size, with every prompt sent to the prefill node, and runs two checks that know nothing of us
through the public interfaces. Prints a line for each and a table at the end; 0 when all passed.

    python -m tests.accept [--transport grpc] [--pairs 1,1 3,1] [--max-num-batched-tokens 64]
"""

import argparse
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.served import Served, ServeFailedError, served

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared"  # where the checks come from, if it is there
TRANSPORTS = ("grpc", "gloo")
PAIRS = ("1,1", "3,1", "1,3", "3,3")
STEP_SIZES = (64, 2048)
CHECK_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to serve."""

    transport: str
    prefill_ranks: int
    decode_ranks: int
    step_size: int

    def overrides(self) -> dict[str, object]:
        return {
            "model.dtype": "float32",
            "kv_transfer.transport": self.transport,
            "prefill.tensor_parallel_size": self.prefill_ranks,
            "decode.tensor_parallel_size": self.decode_ranks,
            "prefill.max_num_batched_tokens": self.step_size,
            "router.local_prefill_below": 0,
        }

    def __str__(self) -> str:
        pair = f"({self.prefill_ranks},{self.decode_ranks})"
        return f"{self.transport:<5} {pair:<6} {self.step_size:>5}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one setting. ``problem`` is None where all was right."""

    setting: Setting
    golden: str
    bad_input: str
    num_disaggregated: int
    took_s: float
    problem: str | None

    def __str__(self) -> str:
        checks = f"golden {self.golden:<20} bad input {self.bad_input:<20}"
        counted = f"{self.num_disaggregated:>3} disaggregated  {self.took_s:>5.0f} s"
        return f"{self.setting}  {checks} {counted}  {self.problem or 'ok'}"


def main() -> int:
    """Run the settings asked for; the exit status."""
    results = []
    for setting in _settings(_arguments()):
        results.append(_check(setting))
        print(results[-1], flush=True)
    failed = [result for result in results if result.problem]
    print(f"\n{len(results) - len(failed)} of {len(results)} settings passed")
    for result in results:
        print(result)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.accept")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--max-num-batched-tokens", nargs="+", type=int, default=STEP_SIZES)
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    for transport, pair, step_size in itertools.product(
        arguments.transport, arguments.pairs, arguments.max_num_batched_tokens
    ):
        prefill_ranks, decode_ranks = map(int, pair.split(","))
        yield Setting(
            transport=transport,
            prefill_ranks=prefill_ranks,
            decode_ranks=decode_ranks,
            step_size=step_size,
        )


def _check(setting: Setting) -> Result:
    began_s = time.monotonic()
    golden = bad_input = "–"
    num_disaggregated = 0
    problem = None
    try:
        with served(setting.overrides()) as cluster:
            golden = _run_check(cluster, "check_golden.py", "--golden", str(_golden_file()))
            bad_input = _run_check(cluster, "check_bad_input.py")
            routes = cluster.wait_until_idle()["routes"]
            num_disaggregated = routes.pop("disaggregated")
            if any(routes.values()) or not num_disaggregated:
                problem = f"routes: {routes}"
        if cluster.process.returncode:
            problem = f"pdserve serve ended with {cluster.process.returncode}"
    except (ServeFailedError, subprocess.SubprocessError) as error:
        problem = str(error)
    return Result(
        setting=setting,
        golden=golden,
        bad_input=bad_input,
        num_disaggregated=num_disaggregated,
        took_s=time.monotonic() - began_s,
        problem=problem,
    )


def _run_check(cluster: Served, name: str, *words: str) -> str:
    """Run an outside check; its last line. Raises ServeFailedError with its words if it failed."""
    copies = [folder / "accept" / name for folder in (SHARED, DATA)]
    script = next(path for path in copies if path.exists())
    done = subprocess.run(
        [sys.executable, str(script), "--base-url", cluster.http_url, *words],
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    last_line = (done.stdout.splitlines() or ["nothing printed"])[-1]
    if done.returncode or not re.fullmatch(r"[1-9]\d* passed, 0 failed", last_line):
        raise ServeFailedError(f"{name}: {done.stdout}{done.stderr}")
    return last_line


def _golden_file() -> Path:
    shared = SHARED / "golden" / "smollm2.json"
    return shared if shared.exists() else DATA / "golden_smollm2.json"


if __name__ == "__main__":
    sys.exit(main())
