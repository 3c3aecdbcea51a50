"""Watches the cluster while it is soaked, and kills one of its processes now and then."""

import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from pdserve.bench.own_cluster import Footprint, OwnCluster, Victim
from pdserve.core.errors import NoNodeError

LOOK_EVERY_S = 1.0
LOOKS_PER_FOOTPRINT = 10


@dataclass(slots=True)
class Sightings:
    """What was seen, with the monotonic time of each."""

    ready_decodes: list[tuple[float, int]] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    kills: list[tuple[float, Victim]] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)  # from a kill to all nodes ready

    def had_no_decode_node(self, since_s: float, until_s: float) -> bool:
        return any(
            count == 0 and since_s <= time_s <= until_s for time_s, count in self.ready_decodes
        )


class Watch:
    """Looks every second; kills ``kill_every_s`` after the last kill, once all nodes are ready."""

    def __init__(self, cluster: OwnCluster, *, kill_every_s: float, seed: int) -> None:
        self.seen = Sightings()
        self._cluster = cluster
        self._kill_every_s = kill_every_s
        self._chance = random.Random(seed)
        self._began_s = self._last_kill_s = time.monotonic()
        self._recovering = False
        self._num_nodes = 0  # that there were at the last kill

    async def run(self, stop: asyncio.Event) -> None:
        looks = 0
        while not stop.is_set():
            status = await asyncio.to_thread(self._status)
            self._look(status)
            if looks % LOOKS_PER_FOOTPRINT == 0 and not self._recovering:
                self.seen.footprints.append(await asyncio.to_thread(self._cluster.footprint))
            if self._is_time_to_kill():
                await asyncio.to_thread(self._kill)
            looks += 1
            try:
                await asyncio.wait_for(stop.wait(), LOOK_EVERY_S)
            except TimeoutError:
                continue

    def _status(self) -> dict[str, Any]:
        try:
            return self._cluster.status()
        except NoNodeError:
            return {"nodes": []}

    def _look(self, status: dict[str, Any]) -> None:
        now_s = time.monotonic()
        nodes = status["nodes"]
        ready = [node for node in nodes if node["ready"]]
        num_decodes = sum(node["role"] == "decode" for node in ready)
        self.seen.ready_decodes.append((now_s, num_decodes))
        if self._recovering and nodes and len(ready) == len(nodes) == self._num_nodes:
            fresh = now_s - self._last_kill_s > 2 * LOOK_EVERY_S  # else the kill is not known yet
            if fresh:
                self._recovering = False
                self.seen.recoveries_s.append(now_s - self._last_kill_s)
                self._say(f"all nodes ready after {self.seen.recoveries_s[-1]:.1f} s")

    def _is_time_to_kill(self) -> bool:
        due = time.monotonic() - self._last_kill_s >= self._kill_every_s
        return due and not self._recovering

    def _kill(self) -> None:
        try:
            victims = self._cluster.victims()
            self._num_nodes = len({victim.node for victim in victims})
        except NoNodeError:
            return
        if not victims:
            return
        victim = self._chance.choice(victims)
        os.kill(victim.pid, signal.SIGKILL)
        self._last_kill_s = time.monotonic()
        self._recovering = True
        self.seen.kills.append((self._last_kill_s, victim))
        self._say(f"killed {victim.node} {victim.part}")

    def _say(self, what: str) -> None:
        """To who waits: the report comes at the end."""
        sys.stderr.write(f"{time.monotonic() - self._began_s:6.0f} s  {what}\n")
