"""How many files a process may have open."""

import subprocess
import sys

import pytest

from pdserve.cluster.open_files import too_few_for

ALLOW = """
import resource, sys
from pdserve.cluster.open_files import allow_open_files
from pdserve.core.errors import ConfigError
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    print(allow_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
except ConfigError as error:
    print(error)
"""


def allowed(soft: int, hard: int) -> str:
    """What a process that starts with these limits comes to."""
    command = [sys.executable, "-c", ALLOW, str(soft), str(hard)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_what_a_shell_gives_is_raised_to_what_is_allowed() -> None:
    assert allowed(1024, 4000) == "4000 4000 4000"
    assert allowed(4000, 4000) == "4000 4000 4000"


def test_too_few_files_are_named_with_what_is_needed() -> None:
    assert allowed(64, 64) == (
        "open files: 64 are allowed here (`ulimit -Hn`), at least 1024 are needed"
    )


@pytest.mark.parametrize(("max_connections", "num_allowed"), [(4096, 20_000), (512, 1024)])
def test_where_there_is_room_for_all_connections_nothing_is_said(
    max_connections: int, num_allowed: int
) -> None:
    assert too_few_for(max_connections, num_allowed) is None


def test_connections_that_there_can_not_be_are_named_by_their_key() -> None:
    problem = too_few_for(4096, 4096)
    assert problem is not None
    assert "router.limits.max_connections: 4096" in problem
    assert "room for about 3584" in problem
