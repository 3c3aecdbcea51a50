"""The stages of one request as its decode node sees them (``core/timeline.py`` names them)."""

from dataclasses import dataclass, field

from pdserve.core.timeline import Stage


@dataclass(slots=True, kw_only=True)
class Timing:
    """Stage durations until the request first decodes here; times are seconds of the node's clock.

    What had to be done twice (a handoff that failed) is there twice; what a preemption recomputes
    later is not.
    """

    node: str
    submitted_s: float
    stages: list[Stage] = field(default_factory=list)
    _ends_s: list[float] = field(default_factory=list)  # of the stages
    _is_admitted: bool = False
    _local_started_s: float | None = None
    _first_tokens_s: float | None = None
    _decoding_from_s: float | None = None
    _is_done: bool = False

    def admitted(self, now_s: float) -> None:
        """Blocks were reserved."""
        if not self._is_admitted:
            self._is_admitted = True
            self._add("reserve", self.node, now_s - self.submitted_s, now_s)

    def local_started(self, now_s: float) -> None:
        """The prompt is prefilled on this node."""
        if self._local_started_s is None:
            self._local_started_s = now_s

    def prefilled(self, now_s: float, node: str, queue_s: float, prefill_s: float) -> None:
        """First tokens came from a prefill node, with the time it took by its own clock."""
        if self._decoding_from_s is None:
            self._first_tokens_s = now_s
            self._add("prefill_queue", node, queue_s, now_s)
            self._add("prefill", node, prefill_s, now_s)

    def transferred(self, now_s: float) -> None:
        """All KV is in, and the first tokens are known."""
        if self._decoding_from_s is None:
            assert self._first_tokens_s is not None
            self._decoding_from_s = now_s
            self._add("transfer", self.node, now_s - self._first_tokens_s, now_s)

    def stepped(self, now_s: float, submitted_s: float, *, is_decode: bool) -> None:
        """A step of this node, submitted then, gave a token; not ``is_decode``: of a prompt."""
        if self._decoding_from_s is None:
            assert not is_decode
            assert self._local_started_s is not None
            self._decoding_from_s = now_s
            self._add("prefill", self.node, now_s - self._local_started_s, now_s)
        elif is_decode and not self._is_done:
            self._is_done = True
            # A step planned ahead of the prompt's result did not wait, and began with that result.
            began_s = max(submitted_s, self._decoding_from_s)
            self._add("decode_queue", self.node, began_s - self._decoding_from_s, began_s)
            self._add("first_decode", self.node, now_s - began_s, now_s)

    def timed(self) -> list[tuple[Stage, float]]:
        """The stages, and when each was over, or its news here."""
        return list(zip(self.stages, self._ends_s, strict=True))

    def _add(self, name: str, node: str, duration_s: float, end_s: float) -> None:
        self._ends_s.append(end_s)
        self.stages.append(Stage(name=name, node=node, duration_s=duration_s))
