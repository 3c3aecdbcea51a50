"""One request between its client and the legs that serve it: what was delivered, and what is next.

A request has n choices. A leg is one attempt, on one decode node, at some of them; the first leg
has all. Per choice:

    RUNNING --finish, max_tokens, stop string--> FINISHED
       |  ^
       |  '-- leg failed or lost: a new leg with prompt + tokens so far, MAX_TRIES times
       '----- leg failed for good, abort, deadline: the request is over

Choices with the same tokens so far go on in one leg, others in one each. An output counts if it is
of the choice's current leg and starts where the tokens so far end: what is late, doubled or of an
earlier leg is dropped; a gap ends the leg, and so does an end without any token. No clock, socket
or task here; the dispatcher carries the actions out, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.core.errors import NodeLostError, PdserveError
from pdserve.core.failures import error_of_kind
from pdserve.core.request import FinishReason, RequestFailure, TokenOutput

MAX_TRIES = 4  # legs that one choice may go through


@dataclass(frozen=True, slots=True, kw_only=True)
class LegLost:
    """Event: the session that carried the leg broke, or no node takes it."""

    attempt: int
    error: PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStopped:
    """Event: the choice's text reached a stop string."""

    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """Event: somebody asked for the end, or nobody reads it; the client gets what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Event: the request cannot go on."""

    error: PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLeg:
    """Action: route these choices and submit them as ``attempt``."""

    attempt: int
    choices: tuple[int, ...]
    output_ids: tuple[int, ...]  # the client has these already
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLeg:
    """Action: forget a leg. ``abort``: its node still works on it and must be told."""

    attempt: int
    abort: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndChoice:
    """Action: tell the leg's node that one of its choices is over, which still runs there."""

    attempt: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Action: the client gets this error, and nothing after it."""

    error: PdserveError


Event = TokenOutput | RequestFailure | LegLost | ChoiceStopped | Aborted | Ended
Action = TokenOutput | StartLeg | EndLeg | EndChoice | Fail  # TokenOutput: for the client


@dataclass(slots=True)
class _Leg:
    choices: set[int]  # those still running
    tries: int


class Delivery:
    """The state of one request. ``over`` is final: from then on no event has an effect."""

    def __init__(self, request_id: str, *, num_choices: int, max_tokens: int) -> None:
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._output_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._leg_of: dict[int, int] = {}  # running choice -> attempt
        self._legs: dict[int, _Leg] = {}
        self._num_attempts = 0

    @property
    def over(self) -> bool:
        return not self._legs

    def start(self) -> list[Action]:
        """The first leg, with all choices."""
        return [self._start_leg(range(len(self._output_ids)), tries=1)]

    def on(self, event: Event) -> list[Action]:
        match event:
            case TokenOutput():
                return self._on_output(event)
            case RequestFailure():
                return self._on_failure(event)
            case LegLost():
                return self._retry(event.attempt, event.error, abort=False)
            case ChoiceStopped():
                return self._finish(event.choice, abort=True)
            case Aborted():
                return self._abort_all()
            case Ended():
                return self._end_all(event.error)

    def _on_output(self, output: TokenOutput) -> list[Action]:
        if self._leg_of.get(output.choice) != output.attempt:
            return []  # of a finished choice or an earlier leg
        so_far = self._output_ids[output.choice]
        if output.index < len(so_far):
            return []  # said twice
        if output.index > len(so_far):
            error = NodeLostError(f"tokens {len(so_far)} to {output.index - 1} never arrived")
            return self._retry(output.attempt, error, abort=True)
        if output.finish_reason is not None and not so_far and not output.token_ids:
            error = NodeLostError("its node ended the answer before the first token")
            return self._retry(output.attempt, error, abort=True)
        room = self._max_tokens - len(so_far)
        if len(output.token_ids) > room:
            output = replace(
                output,
                token_ids=output.token_ids[:room],
                logprobs=output.logprobs[:room],
                finish_reason=FinishReason.LENGTH,
                stop_token_id=None,
            )
            so_far.extend(output.token_ids)
            return [output, *self._finish(output.choice, abort=True)]
        so_far.extend(output.token_ids)
        if output.finish_reason is None:
            return [output]
        return [output, *self._finish(output.choice, abort=False)]

    def _finish(self, choice: int, *, abort: bool) -> list[Action]:
        """The choice is over (``abort``: it runs on its node); its leg too if it was the last."""
        attempt = self._leg_of.pop(choice, None)
        if attempt is None:
            return []
        leg = self._legs[attempt]
        leg.choices.discard(choice)
        if leg.choices:
            return [EndChoice(attempt=attempt, choice=choice)] if abort else []
        del self._legs[attempt]
        return [EndLeg(attempt=attempt, abort=abort)]

    def _on_failure(self, failure: RequestFailure) -> list[Action]:
        if failure.attempt not in self._legs:
            return []
        error = error_of_kind(failure.kind, failure.message)
        if failure.retryable:
            return self._retry(failure.attempt, error, abort=False)
        return self._fail(failure.attempt, error, abort=False)

    def _retry(self, attempt: int, error: PdserveError, *, abort: bool) -> list[Action]:
        if attempt not in self._legs:
            return []
        leg = self._legs[attempt]
        if leg.tries >= MAX_TRIES:
            return self._fail(attempt, error, abort=abort)
        del self._legs[attempt]
        actions: list[Action] = [EndLeg(attempt=attempt, abort=abort)]
        alike: dict[tuple[int, ...], list[int]] = {}
        for choice in sorted(leg.choices):
            alike.setdefault(tuple(self._output_ids[choice]), []).append(choice)
        for output_ids, choices in alike.items():
            if len(output_ids) == self._max_tokens:  # complete, only the finish was lost
                actions += self._finish_by_length(choices, attempt)
            else:
                actions.append(self._start_leg(choices, tries=leg.tries + 1))
        return actions

    def _start_leg(self, choices: Sequence[int], *, tries: int) -> StartLeg:
        attempt = self._num_attempts
        self._num_attempts += 1
        self._legs[attempt] = _Leg(choices=set(choices), tries=tries)
        self._leg_of.update(dict.fromkeys(choices, attempt))
        return StartLeg(
            attempt=attempt,
            choices=tuple(choices),
            output_ids=tuple(self._output_ids[choices[0]]),
            tries=tries,
        )

    def _finish_by_length(self, choices: Sequence[int], attempt: int) -> list[Action]:
        for choice in choices:
            del self._leg_of[choice]
        return [self._last_output(choice, attempt, FinishReason.LENGTH) for choice in choices]

    def _fail(self, attempt: int, error: PdserveError, *, abort: bool) -> list[Action]:
        del self._legs[attempt]
        return [EndLeg(attempt=attempt, abort=abort), *self._end_all(error)]

    def _abort_all(self) -> list[Action]:
        ended = [
            self._last_output(choice, attempt, FinishReason.ABORT)
            for choice, attempt in self._leg_of.items()
        ]
        return [*ended, *self._end_all(None)]

    def _end_all(self, error: PdserveError | None) -> list[Action]:
        actions: list[Action] = [EndLeg(attempt=attempt, abort=True) for attempt in self._legs]
        if error is not None and self._leg_of:
            actions.append(Fail(error=error))
        self._legs.clear()
        self._leg_of.clear()
        return actions

    def _last_output(self, choice: int, attempt: int, reason: FinishReason) -> TokenOutput:
        return TokenOutput(
            request_id=self._request_id,
            attempt=attempt,
            choice=choice,
            index=len(self._output_ids[choice]),
            token_ids=(),
            finish_reason=reason,
        )
