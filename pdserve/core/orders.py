"""What an operator asks of a running cluster, and what the answer is.

Plain data: the router takes orders in, whoever keeps the nodes running carries them out.
"""

from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.failures import error_of_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Send nothing new to the node (``undo``: again), let it finish what it holds."""

    node: str
    undo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Have ``count`` nodes of a role."""

    role: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRole:
    """Have the node work as ``role``, with the ranks that it has."""

    node: str
    role: str


Order = Drain | Scale | ChangeRole


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOrder:
    """An order and the number that its answer carries."""

    number: int
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswer:
    """``message`` says what has begun or, where ``error_kind`` is given, why nothing has."""

    number: int
    message: str
    error_kind: str | None = None

    def text(self) -> str:
        """The message. Raises the error where there is one."""
        if self.error_kind is not None:
            raise error_of_kind(self.error_kind, self.message)
        return self.message


def refusal(number: int, error: PdserveError) -> OrderAnswer:
    return OrderAnswer(number=number, message=str(error), error_kind=error.kind)
