"""Starting rank processes without Ray: for benchmarks and tests."""

import subprocess
import sys

from pdserve.rank.spec import RankSpec


def start_rank_process(spec: RankSpec) -> "subprocess.Popen[bytes]":
    """Start ``python -m pdserve.rank.process``. It ends with its front; the caller reaps it.

    A session of its own keeps the terminal's Ctrl-C for the front, which then stops its ranks.
    """
    path = spec.run_dir / f"rank.{spec.engine.tp_rank}.json"
    path.write_text(spec.to_json(), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "pdserve.rank.process", str(path)], start_new_session=True
    )
