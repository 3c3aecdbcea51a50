"""The state machine of one request: what counts, what is dropped, and how it goes on."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import NodeLostError, TransferError
from pdserve.core.request import FinishReason, RequestFailure, TokenOutput
from router.delivery import (
    MAX_TRIES,
    Aborted,
    Action,
    ChoiceStopped,
    Delivery,
    EndChoice,
    Ended,
    EndLeg,
    Fail,
    LegLost,
    StartLeg,
)

LOST = NodeLostError("decode-0: gone")


def delivery(num_choices: int = 1, max_tokens: int = 10) -> Delivery:
    made = Delivery("r", num_choices=num_choices, max_tokens=max_tokens)
    (first,) = made.start()
    assert first == StartLeg(attempt=0, choices=tuple(range(num_choices)), output_ids=(), tries=1)
    return made


def output(
    index: int,
    token_ids: Sequence[int] = (7,),
    *,
    choice: int = 0,
    attempt: int = 0,
    finish: FinishReason | None = None,
) -> TokenOutput:
    return TokenOutput(
        request_id="r",
        attempt=attempt,
        choice=choice,
        index=index,
        token_ids=tuple(token_ids),
        finish_reason=finish,
    )


def failure(*, retryable: bool, attempt: int = 0) -> RequestFailure:
    return RequestFailure(
        request_id="r",
        attempt=attempt,
        kind="transfer_error",
        message="the link broke",
        retryable=retryable,
    )


def test_tokens_in_order_are_delivered_until_the_finish_ends_the_leg() -> None:
    request = delivery()
    assert request.on(output(0)) == [output(0)]
    last = output(1, (8, 9), finish=FinishReason.STOP)
    assert request.on(last) == [last, EndLeg(attempt=0, abort=False)]
    assert request.over


def test_a_token_said_twice_is_delivered_once() -> None:
    request = delivery()
    request.on(output(0, (7, 8)))
    assert request.on(output(0, (7, 8))) == []
    assert request.on(output(1, (8,))) == []
    assert request.on(output(2, (9,))) == [output(2, (9,))]


def test_a_gap_ends_the_leg_and_starts_the_next_from_what_the_client_has() -> None:
    request = delivery()
    request.on(output(0))
    assert request.on(output(2)) == [
        EndLeg(attempt=0, abort=True),
        StartLeg(attempt=1, choices=(0,), output_ids=(7,), tries=2),
    ]


def test_an_end_without_any_token_is_no_answer() -> None:
    request = delivery()
    assert request.on(output(0, (), finish=FinishReason.STOP)) == [
        EndLeg(attempt=0, abort=True),
        StartLeg(attempt=1, choices=(0,), output_ids=(), tries=2),
    ]
    last = output(0, (7,), attempt=1, finish=FinishReason.STOP)
    assert request.on(last) == [last, EndLeg(attempt=1, abort=False)]


def test_a_lost_leg_goes_on_with_the_tokens_so_far() -> None:
    request = delivery()
    request.on(output(0, (4, 5)))
    assert request.on(LegLost(attempt=0, error=LOST)) == [
        EndLeg(attempt=0, abort=False),
        StartLeg(attempt=1, choices=(0,), output_ids=(4, 5), tries=2),
    ]
    assert request.on(output(2, (6,), attempt=1)) == [output(2, (6,), attempt=1)]


def test_late_tokens_of_an_earlier_attempt_are_dropped() -> None:
    request = delivery()
    request.on(output(0))
    request.on(failure(retryable=True))
    assert request.on(output(1, (99,), attempt=0)) == []
    assert request.on(failure(retryable=False, attempt=0)) == []
    assert request.on(LegLost(attempt=0, error=LOST)) == []
    assert not request.over


def test_choices_with_different_tokens_go_on_in_legs_of_their_own() -> None:
    request = delivery(num_choices=4)
    request.on(output(0, (5,), choice=0))
    request.on(output(0, (6,), choice=1))
    request.on(output(0, (5,), choice=2))
    request.on(output(0, (9,), choice=3, finish=FinishReason.STOP))
    assert request.on(failure(retryable=True)) == [
        EndLeg(attempt=0, abort=False),
        StartLeg(attempt=1, choices=(0, 2), output_ids=(5,), tries=2),
        StartLeg(attempt=2, choices=(1,), output_ids=(6,), tries=2),
    ]


def test_a_failure_for_good_ends_all_legs_with_the_nodes_error() -> None:
    request = delivery(num_choices=2)
    request.on(output(0, (5,), choice=0))
    request.on(failure(retryable=True))
    actions = request.on(failure(retryable=False, attempt=1))
    assert actions[:2] == [EndLeg(attempt=1, abort=False), EndLeg(attempt=2, abort=True)]
    assert isinstance(actions[2], Fail)
    assert isinstance(actions[2].error, TransferError)
    assert str(actions[2].error) == "the link broke"
    assert request.over


def test_a_request_is_tried_a_few_times_and_no_more() -> None:
    request = delivery()
    for attempt in range(MAX_TRIES - 1):
        actions = request.on(LegLost(attempt=attempt, error=LOST))
        assert isinstance(actions[1], StartLeg)
    actions = request.on(LegLost(attempt=MAX_TRIES - 1, error=LOST))
    assert actions[-1] == Fail(error=LOST)
    assert request.over


def test_a_leg_lost_after_its_last_token_needs_no_other() -> None:
    request = delivery(max_tokens=2)
    request.on(output(0, (4, 5)))
    assert request.on(LegLost(attempt=0, error=LOST)) == [
        EndLeg(attempt=0, abort=False),
        output(2, (), finish=FinishReason.LENGTH),
    ]
    assert request.over


def test_a_node_that_goes_on_beyond_max_tokens_is_cut_off() -> None:
    request = delivery(max_tokens=2)
    assert request.on(output(0, (4, 5, 6))) == [
        output(0, (4, 5), finish=FinishReason.LENGTH),
        EndLeg(attempt=0, abort=True),
    ]


def test_a_stop_string_ends_its_choice_and_the_leg_only_when_no_other_runs() -> None:
    request = delivery(num_choices=2)
    assert request.on(ChoiceStopped(choice=1)) == [EndChoice(attempt=0, choice=1)]
    assert request.on(ChoiceStopped(choice=1)) == []
    assert request.on(output(0, choice=1)) == []
    assert request.on(output(0, choice=0)) == [output(0, choice=0)]
    assert request.on(ChoiceStopped(choice=0)) == [EndLeg(attempt=0, abort=True)]
    assert request.on(ChoiceStopped(choice=0)) == []


def test_an_abort_ends_every_choice_that_still_runs() -> None:
    request = delivery(num_choices=2)
    request.on(output(0, (1, 2), choice=0))
    request.on(output(0, (1,), choice=1, finish=FinishReason.STOP))
    assert request.on(Aborted()) == [
        output(2, (), choice=0, finish=FinishReason.ABORT),
        EndLeg(attempt=0, abort=True),
    ]
    assert request.over


def test_a_client_whose_request_has_ended_gets_nothing_more() -> None:
    request, error = delivery(), NodeLostError("gone")
    assert request.on(Ended(error=error)) == [EndLeg(attempt=0, abort=True), Fail(error=error)]
    assert request.on(output(0)) == []
    assert request.on(Aborted()) == []


class Nodes:
    """All legs that were ever started, each of which may still speak at any time."""

    def __init__(self, num_choices: int, max_tokens: int) -> None:
        self.request = Delivery("r", num_choices=num_choices, max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.said: dict[tuple[int, int], int] = {}  # (attempt, choice) -> next index
        self.live: set[int] = set()
        self.running: dict[int, set[int]] = {}  # of each attempt: choices that it has to go on with
        self.got: list[list[int]] = [[] for _ in range(num_choices)]
        self.finished: list[int] = [0] * num_choices
        self.failed = False
        self.carry_out(self.request.start())

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.failed, "nothing comes after a failure"
            match action:
                case StartLeg():
                    assert action.tries <= MAX_TRIES
                    self.live.add(action.attempt)
                    self.running[action.attempt] = set(action.choices)
                    for choice in action.choices:
                        assert list(action.output_ids) == self.got[choice]
                        self.said[action.attempt, choice] = len(action.output_ids)
                case EndLeg():
                    self.live.remove(action.attempt)  # each leg ends once
                case EndChoice():
                    self.running[action.attempt].remove(action.choice)
                    assert self.running[action.attempt], "then the leg is over"
                case Fail():
                    self.failed = True
                case TokenOutput():
                    assert not self.finished[action.choice]
                    assert action.index == len(self.got[action.choice])
                    self.got[action.choice] += action.token_ids
                    self.finished[action.choice] += action.finish_reason is not None
                    if action.finish_reason is FinishReason.STOP:
                        self.running[action.attempt].remove(action.choice)

    def speak(self, attempt: int, choice: int, num_tokens: int, back: int, end: bool) -> None:
        """The true tokens of the choice are 0, 1, 2, …; ``back`` repeats some of them."""
        if (attempt, choice) not in self.said:
            return
        index = max(self.said[attempt, choice] - back, 0)
        token_ids = range(index, min(index + num_tokens, self.max_tokens))
        self.said[attempt, choice] = index + len(token_ids)
        finish = FinishReason.STOP if end else None
        self.carry_out(
            self.request.on(output(index, token_ids, choice=choice, attempt=attempt, finish=finish))
        )


SMALL = st.integers(min_value=0, max_value=3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("speak"), st.integers(0, 8), SMALL, SMALL, SMALL, st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 8)),
        st.tuples(st.just("fail"), st.integers(0, 8), st.booleans()),
        st.tuples(st.just("stop"), SMALL),
        st.tuples(st.just("abort")),
    ),
    max_size=40,
)


@given(EVENTS)
def test_whatever_happens_no_token_comes_twice_and_none_is_missing(
    events: list[tuple[object, ...]],
) -> None:
    nodes = Nodes(num_choices=3, max_tokens=6)
    for event in events:
        match event:
            case ("speak", int(attempt), int(choice), int(num), int(back), bool(end)):
                nodes.speak(attempt, choice % 3, num, back, end)
            case ("lose", int(attempt)):
                nodes.carry_out(nodes.request.on(LegLost(attempt=attempt, error=LOST)))
            case ("fail", int(attempt), bool(retryable)):
                nodes.carry_out(nodes.request.on(failure(retryable=retryable, attempt=attempt)))
            case ("stop", int(choice)):
                nodes.carry_out(nodes.request.on(ChoiceStopped(choice=choice % 3)))
            case ("abort",):
                nodes.carry_out(nodes.request.on(Aborted()))
        for got in nodes.got:
            assert got == list(range(len(got)))
            assert len(got) <= nodes.max_tokens
        assert nodes.request.over == (not nodes.live)
    nodes.carry_out(nodes.request.on(Aborted()))
    assert not nodes.live
    assert nodes.request.over
