"""How many files a process may have open, each connection being one: as many as it is allowed.

A shell gives 1,024 of what is often a million. A process passes its limit on to those it starts.
"""

import resource

from pdserve.core.errors import ConfigError

LEAST = 1024  # Ray's processes and ours, with few clients
MOST = 1 << 16  # there are libraries that walk through all that there could be
BESIDE_CONNECTIONS = 512  # of the router: gRPC's own, nodes, logs, libraries


def allow_open_files() -> int:
    """Raise this process's limit as far as it goes; the limit now. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft not in range(most, MOST + 1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < LEAST:
        raise ConfigError(
            f"open files: {most} are allowed here (`ulimit -Hn`), at least {LEAST} are needed"
        )
    return most


def too_few_for(max_connections: int, num_allowed: int) -> str | None:
    """What to tell who wants more connections than there can be."""
    room = num_allowed - BESIDE_CONNECTIONS
    if max_connections <= room:
        return None
    return (
        f"router.limits.max_connections: {max_connections}, but {num_allowed} open files are "
        f"allowed here (`ulimit -Hn`): there is room for about {room}"
    )
