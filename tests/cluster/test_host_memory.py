"""The memory that is there for ranks on CPUs: the host's, or what its control groups leave."""

import os
from pathlib import Path

import pytest

from pdserve.cluster.host_memory import host_memory_bytes

INSTALLED = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = "9223372036854771712"  # what version 1 shows
SERVICE = "0::/system.slice/pdserve.service\n"


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        (None, {}, INSTALLED),
        ("0::/\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/\n", {"memory.max": "max\n"}, INSTALLED),
        (SERVICE, {"system.slice/pdserve.service/memory.max": "1048576\n"}, 1 << 20),
        (
            SERVICE,
            {
                "system.slice/memory.max": "1048576\n",
                "system.slice/pdserve.service/memory.max": "max\n",
            },
            1 << 20,
        ),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "1048576\n"}, 1 << 20),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": f"{UNLIMITED}\n"}, INSTALLED),
    ],
)
def test_the_least_limit_counts(
    tmp_path: Path, own_groups: str | None, files: dict[str, str], expected: int
) -> None:
    if own_groups is not None:
        (tmp_path / "own").write_text(own_groups)
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert host_memory_bytes(tmp_path / "groups", tmp_path / "own") == expected


def test_this_host_has_some() -> None:
    assert 0 < host_memory_bytes() <= INSTALLED
