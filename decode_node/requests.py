"""The requests that routers own on this node, and what each router is still to be told."""

from dataclasses import dataclass, field

from decode_node.events import NewToken
from decode_node.timing import Timing
from pdserve.core.errors import PdserveError
from pdserve.core.request import HandoffId, Request, RequestFailure, RouteTaken, TokenOutput
from pdserve.core.timeline import Timeline
from pdserve.engine.sequence import Sequence
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2


class RouterSession:
    """What one router is told: everything of one step in one message."""

    def __init__(self, outbox: Outbox[session_pb2.DecodeMessage]) -> None:
        self.outbox = outbox
        self._outputs = session_pb2.StepOutputs()
        self._is_empty = True

    def put(self, output: TokenOutput) -> None:
        self._outputs.outputs.append(convert.output_to_proto(output))
        self._is_empty = False

    def put_failure(self, failure: RequestFailure) -> None:
        self._outputs.failures.append(convert.failure_to_proto(failure))
        self._is_empty = False

    def put_timeline(self, request: Request, timeline: Timeline) -> None:
        message = session_pb2.RequestTimeline(
            request_id=request.request_id,
            attempt=request.attempt,
            timeline=convert.timeline_to_proto(timeline),
        )
        self._outputs.timelines.append(message)
        self._is_empty = False

    def flush(self) -> None:
        """Send what was put since the last flush."""
        if not self._is_empty:
            self.outbox.put(session_pb2.DecodeMessage(outputs=self._outputs))
            self._outputs = session_pb2.StepOutputs()
            self._is_empty = True


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One request: its living sequences by choice, the rest of its route, its proof of work."""

    request: Request
    session: RouterSession
    timing: Timing
    route_taken: RouteTaken = RouteTaken.LOCAL
    transport: str | None = None
    kv_bytes: int = 0
    num_preemptions: int = 0
    last_failure: str | None = None
    _living: dict[int, Sequence] = field(default_factory=dict)
    _alternates: dict[int, list[str]] = field(default_factory=dict)
    _num_legs: int = 0
    _has_output: bool = False

    def live(self, *sequences: Sequence, from_the_start: bool = True) -> None:
        """These are the sequences of their choices now; each takes its route from the start or goes
        on.
        """
        for sequence in sequences:
            for choice in sequence.choices:
                self._living[choice] = sequence
                if from_the_start:
                    self._alternates[choice] = list(self.request.route.prefill_nodes)

    @property
    def sequences(self) -> list[Sequence]:
        """The living ones, each once."""
        return list(dict.fromkeys(self._living.values()))

    def next_alternate(self, sequence: Sequence) -> str | None:
        """The next prefill node of the sequence's route; None at its end."""
        left = self._alternates[sequence.choices[0]]
        node = left.pop(0) if left else None
        for choice in sequence.choices:
            self._alternates[choice] = list(left)
        return node

    def next_handoff(self) -> HandoffId:
        self._num_legs += 1
        return HandoffId(self.request.request_id, self.request.attempt, self._num_legs)

    def put_token(self, event: NewToken) -> None:
        """Tell the router of a token; of its stages too, with the first one."""
        output = TokenOutput(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            choice=event.sequence.choices[0],
            index=event.index,
            token_ids=(event.token_id,),
            logprobs=(event.logprobs,) if event.logprobs is not None else (),
            finish_reason=event.finish_reason,
            stop_token_id=self._stop_token_id(event),
        )
        self.session.put(output)
        if not self._has_output:
            self._has_output = True
            self.put_timeline()

    def finish(self, sequence: Sequence) -> bool:
        """A choice has ended; True if it was the last."""
        for choice in sequence.choices:
            self._living.pop(choice, None)
        return not self._living

    def put_timeline(self) -> None:
        timeline = Timeline(
            route=self.route_taken,
            stages=tuple(self.timing.stages),
            kv_bytes=self.kv_bytes,
            transport=self.transport if self.kv_bytes else None,
            num_preemptions=self.num_preemptions,
        )
        self.session.put_timeline(self.request, timeline)

    def put_failure(self, error: PdserveError, *, retryable: bool) -> None:
        failure = RequestFailure(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            kind=error.kind,
            message=str(error),
            retryable=retryable,
        )
        self.session.put_failure(failure)

    def _stop_token_id(self, event: NewToken) -> int | None:
        return event.token_id if event.token_id in event.sequence.end_token_ids else None
