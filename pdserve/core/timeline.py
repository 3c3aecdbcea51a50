"""Where the time of one request went, stage by stage, and the proof of who did the work.

Each stage is measured by the monotonic clock of the one process that did it. Stages in order:
``admission`` and ``router_queue`` (router: until accepted; until a decode node had room),
``reserve`` (decode: waiting for blocks), ``prefill_queue`` and ``prefill``
(the node that prefilled), ``transfer`` (decode: first token known → all KV blocks in),
``decode_queue`` (decode: blocks in → first decode step), ``first_decode`` (that step).
"""

from dataclasses import dataclass

from pdserve.core.request import RouteTaken

STAGE_NAMES = (
    "admission",
    "router_queue",
    "reserve",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_queue",
    "first_decode",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: its name, the node that did it and how long it took."""

    name: str
    node: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The stages of one request.

    ``kv_bytes`` are payload bytes that crossed between nodes. ``cached_tokens``: of the client's
    prompt, those whose KV no node computed for this request.
    """

    route: RouteTaken
    stages: tuple[Stage, ...]
    kv_bytes: int = 0
    transport: str | None = None
    num_preemptions: int = 0
    cached_tokens: int = 0
