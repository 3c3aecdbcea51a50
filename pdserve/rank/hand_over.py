"""Ranks that pass from one node to the next: processes, weights and graphs stay, nothing else.

The front's part; what each rank does about it is ``TakeName``.
"""

import asyncio

from kv_transfer.commands import NameTaken, TakeName
from pdserve.core.errors import RankError
from pdserve.engine.batch import Batch
from pdserve.rank.ranks import Ranks

NAMING_TIMEOUT_S = 30.0  # for KV endpoints, which may be within one frame


async def hand_over(ranks: Ranks, parting: Batch | None, incarnation: str) -> None:
    """Have the ranks forget the node that they worked for, and be those of the next one.

    ``parting`` is the last step of the old node, nobody of which submits or listens any more. What
    the ranks had still to say of it is read here, so that the new one hears only of itself. Raises
    RankError when the ranks are lost or do not answer.
    """
    if parting is not None:
        await ranks.submit(parting).output()
    ranks.kv(TakeName(peer_id=incarnation))
    waiting = set(range(ranks.layout.tp_size))
    try:
        async with asyncio.timeout(NAMING_TIMEOUT_S):
            while waiting:
                rank, event = await ranks.next_event()
                if event == NameTaken(peer_id=incarnation):
                    waiting.discard(rank)
    except TimeoutError as error:
        raise RankError(
            f"ranks {', '.join(map(str, sorted(waiting)))}: did not become {incarnation} within "
            f"{NAMING_TIMEOUT_S:g} s"
        ) from error
