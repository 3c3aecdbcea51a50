"""A front that starts two ranks, submits steps up to and with a bad one, and waits to be killed.

python -m tests.rank.front_child RUN_DIR NUM_STEPS
"""

import asyncio
import sys
from pathlib import Path

from pdserve.engine.batch import Batch
from pdserve.rank.ring_ranks import start_ranks


async def main(run_dir: Path, num_steps: int) -> None:
    ranks = await start_ranks(run_dir=run_dir, tp_size=2, start_timeout_s=20, step_timeout_s=60)
    for step in range(num_steps):
        ranks.submit(Batch(step=step))
    print("running", flush=True)
    await ranks.next_event()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
