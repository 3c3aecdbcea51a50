"""What a command writes, and what if nobody reads it."""

import io
import os

from pdserve.cluster.console import Console


def test_a_stage_is_a_line() -> None:
    out = io.StringIO()
    Console(out).say("ray", "private")
    assert out.getvalue() == "ray        private\n"


def test_who_reads_a_pipe_may_go_away() -> None:
    """`pdserve serve | head -1` serves on."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out:
        console = Console(out)
        console.line("heard")
        assert os.read(reading, 100) == b"heard\n"
        os.close(reading)
        for _ in range(2):
            console.line("unheard")
