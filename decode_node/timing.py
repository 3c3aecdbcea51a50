"""The stages of one request as its decode node sees them (``core/timeline.py`` names them)."""

from dataclasses import dataclass, field

from pdserve.core.timeline import Stage


@dataclass(slots=True, kw_only=True)
class Timing:
    """Stage durations of a request's first life; times are seconds of the node's clock."""

    node: str
    submitted_s: float
    stages: list[Stage] = field(default_factory=list)
    _admitted: bool = False
    _local_started_s: float | None = None
    _first_tokens_s: float | None = None
    _decoding_from_s: float | None = None
    _done: bool = False

    def admitted(self, now_s: float) -> None:
        """Blocks were reserved."""
        if not self._admitted:
            self._admitted = True
            self._add("reserve", self.node, now_s - self.submitted_s)

    def local_started(self, now_s: float) -> None:
        """The prompt is prefilled on this node."""
        if self._first_tokens_s is None:
            self._local_started_s = now_s

    def prefilled(self, now_s: float, node: str, queue_s: float, prefill_s: float) -> None:
        """First tokens came from a prefill node, with the time it took by its own clock."""
        if self._first_tokens_s is None:
            self._first_tokens_s = now_s
            self._add("prefill_queue", node, queue_s)
            self._add("prefill", node, prefill_s)

    def transferred(self, now_s: float) -> None:
        """All KV is in."""
        if self._first_tokens_s is not None and self._decoding_from_s is None:
            self._decoding_from_s = now_s
            self._add("transfer", self.node, now_s - self._first_tokens_s)

    def token(self, now_s: float, step_submitted_s: float | None) -> None:
        """A token came; ``step_submitted_s`` if a step of this node sampled it."""
        if self._done or step_submitted_s is None:
            return
        if self._first_tokens_s is None:  # the first token, of a local prefill
            self._first_tokens_s = self._decoding_from_s = now_s
            started_s = self._local_started_s or now_s
            self._add("prefill", self.node, now_s - started_s)
        elif self._decoding_from_s is not None:
            self._done = True
            waited_s = max(0.0, step_submitted_s - self._decoding_from_s)
            self._add("decode_queue", self.node, waited_s)
            self._add("first_decode", self.node, now_s - step_submitted_s)

    def _add(self, name: str, node: str, duration_s: float) -> None:
        self.stages.append(Stage(name=name, node=node, duration_s=duration_s))
