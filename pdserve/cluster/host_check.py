"""Whether each host that may run ranks has pdserve and the model of this one, before any rank is.

Each such host looks for itself, all at once; what is wrong is said of all of them together. A host
that comes later is not looked at here: its ranks look before they load (`rank_entry.py`).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdserve.cluster.placement import bundles
from pdserve.cluster.resolve import Host, NodePlan
from pdserve.cluster.version import version
from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import ModelIdentity, check_identity

LOOK_TIMEOUT_S = 120.0  # of all hosts: a process is started on each, and weights may lie far away


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What each host should have."""

    model_dir: Path
    identity: ModelIdentity
    version: str  # of pdserve


class Lookout(Protocol):
    """Asks hosts."""

    def problems(self, hosts: Sequence[Host], wanted: Wanted) -> Mapping[str, str]:
        """What is wrong with each host where something is, by ``Host.node_id``."""


def hosts_for(nodes: Iterable[NodePlan], hosts: Iterable[Host]) -> tuple[Host, ...]:
    """The hosts that are large enough for one of the nodes: Ray may place it there."""
    groups = [_total(bundles(plan)) for plan in nodes]
    return tuple(host for host in hosts if any(_holds(host, group) for group in groups))


def check_hosts(hosts: Sequence[Host], wanted: Wanted, lookout: Lookout, source: str) -> None:
    """Raises ModelFilesError that names every host where something is wrong, and what."""
    problems = lookout.problems(hosts, wanted)
    if not problems:
        return
    lines = [f"  {host}: {problems[host.node_id]}" for host in hosts if host.node_id in problems]
    raise ModelFilesError(
        f"model.source: {len(lines)} of {len(hosts)} hosts cannot serve {source!r} as this one "
        f"has it (at {wanted.model_dir}, fingerprint {wanted.identity.fingerprint}):\n"
        + "\n".join(lines)
    )


class RayLookout:
    """A ``Lookout`` over Ray tasks, one on each host."""

    def problems(self, hosts: Sequence[Host], wanted: Wanted) -> Mapping[str, str]:
        look = ray.remote(num_cpus=0, max_retries=0)(problem_here)
        answers = {host.node_id: look.options(**_on(host)).remote(wanted) for host in hosts}
        deadline_s = time.monotonic() + LOOK_TIMEOUT_S
        found = {node_id: _said(answer, deadline_s) for node_id, answer in answers.items()}
        return {node_id: problem for node_id, problem in found.items() if problem is not None}


def problem_here(wanted: Wanted) -> str | None:
    """What is wrong on the host that this runs on."""
    if version() != wanted.version:
        return f"pdserve is {version()} there, {wanted.version} here"
    try:
        check_identity(wanted.model_dir, wanted.identity)
    except ModelFilesError as error:
        return str(error)
    return None


def _on(host: Host) -> dict[str, object]:
    strategy = NodeAffinitySchedulingStrategy(node_id=host.node_id, soft=False)
    return {"scheduling_strategy": strategy}


def _said(answer: "ray.ObjectRef[str | None]", deadline_s: float) -> str | None:
    try:
        return ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
    except GetTimeoutError:
        return f"no answer in {LOOK_TIMEOUT_S:g} s"
    except RayError as error:  # pdserve is not installed there, no process starts, …
        return f"cannot look: {str(error).strip().splitlines()[-1]}"


def _total(group: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in group:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _holds(host: Host, group: Mapping[str, float]) -> bool:
    offered = dict(host.resources)
    return all(offered.get(name, 0.0) >= amount for name, amount in group.items())
