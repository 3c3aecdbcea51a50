"""The processes of a cluster that a test kills or stops, and whether all of a node are gone."""

from dataclasses import dataclass
from typing import Any

from tests.cluster.processes import descendants, listener
from tests.cluster.served import Served

OURS = ("FrontActor", "RankActor")  # in the names of our processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """``name`` is what the supervisor calls it; ``whole``: what must end with it."""

    name: str
    pid: int
    whole: tuple[int, ...]


def our_processes(cluster: Served) -> dict[int, str]:
    """Fronts, ranks and the router."""
    below = descendants(cluster.process.pid)
    return {pid: name for pid, name in below.items() if any(word in name for word in OURS)}


def find(cluster: Served, part: str) -> Victim:
    """``part`` is ``router`` or a role and a process of its first node: ``decode rank``."""
    if part == "router":
        pid = listener(our_processes(cluster), int(cluster.http_url.rpartition(":")[2]))
        return Victim(name="router", pid=pid, whole=(pid,))
    role, process = part.split()
    node = _first_node(cluster, role)
    front = listener(our_processes(cluster), int(node["address"].rpartition(":")[2]))
    ranks = [rank["pid"] for rank in node["ranks"]]
    pid = front if process == "front" else ranks[0]
    return Victim(name=node["name"], pid=pid, whole=(front, *ranks))


def _first_node(cluster: Served, role: str) -> dict[str, Any]:
    found: dict[str, Any] = next(n for n in cluster.status()["nodes"] if n["role"] == role)
    return found
