"""One rank of a TP group in a process of its own: ``python -m tests.gpu.tp_rank …``.

Writes what the rank computed to a file: log-probabilities, greedy tokens, its devices and group.
"""

import json
import sys
from pathlib import Path

import torch

from pdserve.core.environment import set_up_gpu_rank
from pdserve.core.request import SamplingParams
from pdserve.engine.parallel import SoloGroup, start_tp_group
from tests.engine.runs import greedy, logprobs_after, make_runner

PROMPTS = [[(7 * i * i + n) % 199 for i in range(n)] for n in (33, 1, 50, 16)]
NUM_TOKENS = 8
DRAWN = [
    SamplingParams(max_tokens=99, temperature=1.2, seed=5),
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, temperature=0.8, top_p=0.9, seed=6),
    SamplingParams(max_tokens=99, temperature=1.5, top_k=20, seed=7),
]


def main(model_dir: str, store: str, rank: str, size: str, out: str, changes: str) -> None:
    """Run the rank on the GPU of its number. ``changes``: of the engine's config, as JSON."""
    set_up_gpu_rank()
    device = torch.device("cuda", int(rank))
    group = (
        SoloGroup()
        if size == "1"
        else start_tp_group(
            store_path=Path(store),
            tp_rank=int(rank),
            tp_size=int(size),
            device=device,
            timeout_s=60,
        )
    )
    runner = make_runner(
        Path(model_dir),
        group,
        device=str(device),
        tp_size=int(size),
        tp_rank=int(rank),
        **json.loads(changes),
    )
    runner.warm_up()
    found = {
        "logprobs": logprobs_after(runner, PROMPTS[2]),
        "tokens": greedy(runner, PROMPTS, NUM_TOKENS, chunk_len=20),
        "drawn": greedy(runner, PROMPTS, NUM_TOKENS, chunk_len=20, sampling_of=DRAWN),
        "num_blocks": runner.num_blocks,
        "devices": (torch.cuda.current_device(), runner.kv.tensor.device.index),
        "used_elsewhere": torch.cuda.memory_allocated(1 - device.index) if size == "2" else 0,
        "group": type(group).__name__,
        "has_graphs": runner._graphs is not None,
    }
    torch.save(found, out)
    group.close()


if __name__ == "__main__":
    if "--without-peer-memory" in sys.argv:
        sys.argv.remove("--without-peer-memory")
        sys.modules["pdserve.engine.peer_group"] = None  # type: ignore[assignment]
    main(*sys.argv[1:])
