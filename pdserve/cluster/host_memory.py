"""How much memory the processes of this host may use: a container or a service can have less of it.

Linux says so in the files of control groups. Inside a container its own group is at the root of
what is mounted, under systemd a service's group is somewhere below; a limit above it counts too.
"""

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def host_memory_bytes(groups: Path = _GROUPS, own_groups: Path = _OWN_GROUPS) -> int:
    """What is installed, or the least limit of the groups that this process is in."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_limit(file) for file in _limit_files(groups, own_groups))
    return min([installed, *(limit for limit in limits if limit is not None)])


def _limit_files(groups: Path, own_groups: Path) -> list[Path]:
    """Version 1 of control groups, then version 2, where each group up to the root can have one."""
    own = Path(_group_of_version_2(own_groups))
    return [
        groups / "memory" / "memory.limit_in_bytes",
        *(groups / group / "memory.max" for group in (own, *own.parents)),
    ]


def _group_of_version_2(own_groups: Path) -> str:
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
