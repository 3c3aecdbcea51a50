"""What a rank and its front say beside batches and KV commands: ready, alive, failed, stop."""

from dataclasses import dataclass

from pdserve.core.kv_layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """The rank is warm. ``address`` is ``host:port`` of its KV endpoint."""

    rank: int
    pid: int
    num_blocks: int
    layout: KvLayout
    address: str


@dataclass(frozen=True, slots=True)
class Pulse:
    """Rank to front, every second: the process runs, however long its step takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """The rank can not go on; its node ends whole. ``kind`` is that of ``PdserveError``."""

    rank: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Front to rank: finish what is in flight and end."""
