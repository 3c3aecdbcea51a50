"""What an operator's order means for the nodes that there are to be: pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pdserve.cluster.resolve import NodePlan
from pdserve.core.config import MAX_NODES, DecodeConfig
from pdserve.core.errors import InvalidRequestError
from pdserve.core.node import Role
from pdserve.core.orders import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The nodes to start, and those to drain and end."""

    added: tuple[NodePlan, ...] = ()
    removed: tuple[NodePlan, ...] = ()


def change_for(
    order: Scale, plans: Iterable[NodePlan], templates: Mapping[Role, NodePlan], taken: set[str]
) -> Change:
    """The nodes with the highest numbers go first; new ones take the lowest that are free.

    ``templates`` has a plan of each role that the cluster was started with, ``taken`` the names
    still in use. Raises InvalidRequestError naming what is wrong.
    """
    role = role_named(order.role)
    template = template_of(role, templates)
    _check_count(role, order.count, templates)
    present = sorted((plan for plan in plans if plan.role is role), key=_place)
    if order.count <= len(present):
        return Change(removed=tuple(present[order.count :]))
    names = _free_names(role, taken)
    missing = order.count - len(present)
    return Change(added=tuple(replace(template, name=next(names)) for _ in range(missing)))


def number_of(name: str) -> int:
    """3 of decode-3."""
    return int(name.rpartition("-")[2])


def role_named(name: str) -> Role:
    """Raises InvalidRequestError for what is none."""
    if name not in set(Role):
        raise InvalidRequestError("role", f"got {name!r}, allowed are {', '.join(Role)}")
    return Role(name)


def template_of(role: Role, templates: Mapping[Role, NodePlan]) -> NodePlan:
    """A node of this role as the cluster file has it. Raises InvalidRequestError."""
    if (template := templates.get(role)) is None:
        raise InvalidRequestError(
            "role", f"the cluster was started without {role} nodes; set {role}.replicas"
        )
    return template


def _place(plan: NodePlan) -> tuple[int, str]:
    """By number; a node keeps its name in another role, so two may have the same one."""
    return number_of(plan.name), plan.name


def _check_count(role: Role, count: int, templates: Mapping[Role, NodePlan]) -> None:
    least = 0 if role is Role.PREFILL else 1
    decode = templates[Role.DECODE].pool
    assert isinstance(decode, DecodeConfig)
    if role is Role.PREFILL and not decode.local_prefill_tokens:
        least = 1  # nobody else prefills
    if not least <= count <= MAX_NODES:
        raise InvalidRequestError(
            "count", f"got {count}, allowed are {least} to {MAX_NODES} {role} nodes"
        )


def _free_names(role: Role, taken: set[str]) -> Iterator[str]:
    return (name for i in range(2 * MAX_NODES) if (name := f"{role}-{i}") not in taken)
