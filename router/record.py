"""How one request went: what the metrics count, the live page shows and a trace says of it.

Holds numbers and names only, never a prompt or an answer.
"""

from dataclasses import dataclass

from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Timeline

ROUTER = "router"  # its name in timelines


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds of the router's clock. ``error``: the kind of what ended it."""

    request_id: str
    arrived_s: float
    ended_s: float
    first_token_s: float | None  # None: no token came
    num_prompt_tokens: int
    num_output_tokens: int
    num_choices: int
    num_attempts: int
    planned: RouteTaken | None
    timeline: Timeline | None  # with the router's own stages; None: no node told one
    error: str | None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.arrived_s

    def log_fields(self, label: str) -> dict[str, object]:
        """What a log of objects has of it. ``label``: the client's own."""
        return {
            "request_id": self.request_id,
            "label": label or None,
            "route": self.timeline.route.value if self.timeline else None,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "ttft_s": self.ttft_s,
            "latency_s": self.latency_s,
            "error": self.error,
        }
