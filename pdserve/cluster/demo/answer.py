"""An answer with its times and stages, the checks it has to pass and the table it is shown as."""

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.cluster.demo.questions import Question
from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Timeline

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client saw. Times by its own clock, from sending to the first and the last token."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float
    timeline: Timeline

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first."""
        if self.completion_tokens < 2:  # noqa: PLR2004  (there is none after the first)
            return None
        return (self.total_s - self.first_token_s) / (self.completion_tokens - 1)


def problems(question: Question, answer: Answer) -> list[str]:
    """What is wrong with an answer; nothing if it is right and came by the expected way."""
    found = []
    if question.answer_holds not in answer.text:
        found.append(f"the answer does not hold {question.answer_holds!r}")
    route = answer.timeline.route
    if route is not question.route:
        found.append(f"the route was {route}, expected {question.route}")
    if route is RouteTaken.DISAGGREGATED and not answer.timeline.kv_bytes:
        found.append("no KV bytes moved")
    return found


def stage_table(answer: Answer) -> Iterator[str]:
    """Where the time went, a line for each stage, the client's own figures last."""
    timeline = answer.timeline
    rows = [
        ("route", str(timeline.route), f"{answer.prompt_tokens} prompt tokens"),
        *((stage.name, _ms(stage.duration_s), stage.node) for stage in timeline.stages),
        ("KV moved", _bytes(timeline.kv_bytes), _moved(timeline)),
        ("first token", _ms(answer.first_token_s), "as the client saw it"),
        ("per token", _ms(answer.per_token_s), f"{answer.completion_tokens} output tokens"),
    ]
    for name, value, remark in rows:
        yield f"  {name:<14} {value:>14}   {remark}".rstrip()


def _ms(duration_s: float | None) -> str:
    return "–" if duration_s is None else f"{duration_s * 1000:,.1f} ms"


def _bytes(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"


def _moved(timeline: Timeline) -> str:
    if timeline.transport is None:
        return "nothing to move"
    waited_s = sum(stage.duration_s for stage in timeline.stages if stage.name == "transfer")
    return f"over {timeline.transport}, all there {_ms(waited_s)} after the first token was known"
