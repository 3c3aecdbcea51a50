"""The nodes that there are to be, as the one who keeps them running tells.

Those that run are in the router's channels; here are also those that are being made.
"""

from collections.abc import Iterable

from pdserve.core.node import NodeStanding, Standing
from router.channel import Channels


class Roster:
    """Empty where nobody tells, as for a router that was given addresses."""

    def __init__(self, channels: Channels) -> None:
        self.standings: tuple[NodeStanding, ...] = ()
        self._channels = channels

    def set(self, standings: Iterable[NodeStanding]) -> None:
        """All nodes from now on; connect to those that run, send nothing new to what drains."""
        self.standings = tuple(standings)
        addresses = (standing.address for standing in self.standings)
        self._channels.set_draining(
            standing.name for standing in self.standings if standing.standing is Standing.DRAINING
        )
        self._channels.set_nodes(address for address in addresses if address is not None)
