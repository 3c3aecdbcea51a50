"""The requests that routers own on this node, and what each router is still to be told."""

from dataclasses import dataclass, field

from decode_node.events import NewToken
from decode_node.timing import Timing
from pdserve.core.errors import PdserveError
from pdserve.core.request import (
    FinishReason,
    PromptOutput,
    Request,
    RequestFailure,
    RequestKey,
    RouteTaken,
    TokenOutput,
)
from pdserve.core.timeline import Timeline
from pdserve.engine.batch import Scored
from pdserve.engine.sequence import Sequence
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2
from pdserve.telemetry.traces import Span


class RouterSession:
    """What one router is told: everything of one step in one message."""

    def __init__(self, outbox: Outbox[session_pb2.DecodeMessage]) -> None:
        self.outbox = outbox
        self._outputs = session_pb2.StepOutputs()
        self._is_empty = True

    def put(self, output: TokenOutput) -> None:
        convert.fill_output(self._outputs.outputs.add(), output)
        self._is_empty = False

    def put_prompt(self, output: PromptOutput) -> None:
        self._outputs.prompt_outputs.append(convert.prompt_output_to_proto(output))
        self._is_empty = False

    def put_failure(self, key: RequestKey, error: PdserveError, *, retryable: bool) -> None:
        failure = RequestFailure(
            request_id=key.request_id,
            attempt=key.attempt,
            kind=error.kind,
            message=str(error),
            retryable=retryable,
        )
        self._outputs.failures.append(convert.failure_to_proto(failure))
        self._is_empty = False

    def put_timeline(self, key: RequestKey, timeline: Timeline) -> None:
        message = session_pb2.RequestTimeline(
            request_id=key.request_id,
            attempt=key.attempt,
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
    span: Span | None = None  # None: it is not traced
    last_failure: str | None = None
    _route_taken: RouteTaken = RouteTaken.LOCAL
    _is_route_settled: bool = False
    _transport: str | None = None
    _kv_bytes: int = 0
    _num_preemptions: int = 0
    _cached_tokens: int = 0
    _living: dict[int, Sequence] = field(default_factory=dict)
    _alternates: dict[int, list[str]] = field(default_factory=dict)
    _has_output: bool = False

    # ---- sequences and their routes ---------------------------------------------------------

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

    def parted(self, choice: int) -> Sequence | None:
        """The living sequence of this choice, if it is of no other too."""
        sequence = self._living.get(choice)
        return sequence if sequence is not None and sequence.choices == (choice,) else None

    def next_alternate(self, sequence: Sequence) -> str | None:
        """The next prefill node of the sequence's route; None at its end."""
        left = self._alternates[sequence.choices[0]]
        node = left.pop(0) if left else None
        for choice in sequence.choices:
            self._alternates[choice] = list(left)
        return node

    def finish(self, sequence: Sequence) -> bool:
        """A choice has ended; True if it was the last."""
        for choice in sequence.choices:
            self._living.pop(choice, None)
        return not self._living

    # ---- proof of work ----------------------------------------------------------------------

    def take_route(self, route: RouteTaken) -> None:
        """The prompt is on this way now; the way after which it first decodes is the one told."""
        if not self._is_route_settled:
            self._route_taken = route

    def settle_route(self) -> None:
        """It decodes; what a preemption recomputes changes nothing."""
        self._is_route_settled = True

    def count_transfer(self, num_bytes: int, transport: str) -> None:
        """A sequence decodes with KV that a handoff brought."""
        self._kv_bytes += num_bytes
        self._transport = transport

    def count_cached(self, num_tokens: int) -> None:
        """The prefill of the first output finds KV of so many tokens; later ones change nothing."""
        if not self._has_output:
            self._cached_tokens = min(num_tokens, self.request.prompt_len)

    def count_replaced(self, sequence: Sequence) -> None:
        """A sequence made way for want of blocks: a preemption if work on it was lost."""
        is_begun = sequence.num_planned > sequence.num_cached
        if is_begun or len(sequence.token_ids) > sequence.num_prompt:
            self._num_preemptions += 1

    # ---- what the router is told ------------------------------------------------------------

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

    def put_scored(self, scored: Scored) -> None:
        """Tell the router how likely some of the prompt's tokens were."""
        self.session.put_prompt(
            PromptOutput(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                index=scored.start,
                logprobs=scored.logprobs,
            )
        )

    def put_complete(self) -> None:
        """Tell the router that what the client has is all there is."""
        for choice in self.request.choices:
            output = TokenOutput(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                choice=choice,
                index=len(self.request.token_ids) - self.request.prompt_len,
                token_ids=(),
                finish_reason=FinishReason.STOP,
            )
            self.session.put(output)
        self.put_timeline()

    def put_timeline(self) -> None:
        timeline = Timeline(
            route=self._route_taken,
            stages=tuple(self.timing.stages),
            kv_bytes=self._kv_bytes,
            transport=self._transport,
            num_preemptions=self._num_preemptions,
            cached_tokens=self._cached_tokens,
        )
        self.session.put_timeline(self.request.key, timeline)

    def put_failure(self, error: PdserveError, *, retryable: bool) -> None:
        self.session.put_failure(self.request.key, error, retryable=retryable)

    def _stop_token_id(self, event: NewToken) -> int | None:
        return event.token_id if event.token_id in event.sequence.end_token_ids else None
