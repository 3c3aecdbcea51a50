"""How many are taken in, who waits and for how long, and what can never fit."""

import pytest

from pdserve.core.config import LimitsConfig, PromptClass
from pdserve.core.errors import NeverFitsError, OverloadedError
from router.admission import OVERTAKE_S, Admission, Refusal, fit_max_tokens
from router.validation import SamplingFields
from router.waiting import Demand

CLASSES = (
    PromptClass(name="short", below=100, max_queued=3, queue_timeout_s=5.0),
    PromptClass(name="long"),
)


def make(*, most: int = 100) -> Admission:
    return Admission(LimitsConfig(max_queued_requests=most), CLASSES)


def demands(*names: str, prompt_len: int = 200) -> dict[str, Demand]:
    return {name: Demand(prompt_len=prompt_len, max_tokens=10, num_choices=1) for name in names}


def admit(
    admission: Admission,
    *names: str,
    now_s: float = 0.0,
    prompt_len: int = 200,
    tenant: str = "a",
    priority: int = 0,
) -> None:
    wanted = demands(*names, prompt_len=prompt_len)
    admission.admit(wanted, tenant=tenant, priority=priority, now_s=now_s)


def release(admission: Admission, name: str, now_s: float) -> None:
    admission.release(name, now_s, num_output_tokens=1)


def offered(admission: Admission, now_s: float) -> list[str]:
    return [ticket.request_id for ticket in admission.candidates(now_s)]


def waiting(admission: Admission, now_s: float = 0.0) -> dict[str, int]:
    return {q.prompt_class: q.num_waiting for q in admission.report(now_s).queues}


def test_requests_are_taken_in_up_to_the_bound_and_again_after_a_release() -> None:
    admission = make(most=2)
    admit(admission, "r0", "r1")
    with pytest.raises(OverloadedError, match="at most 2"):
        admit(admission, "r2")
    release(admission, "r0", now_s=1.0)
    admit(admission, "r3", now_s=1.0)
    assert admission.num_admitted == 2


def test_prompts_of_one_call_are_taken_in_together_or_not_at_all() -> None:
    admission = make(most=3)
    admit(admission, "r0", "r1")
    with pytest.raises(OverloadedError):
        admit(admission, "r2", "r3")
    assert (admission.num_admitted, admission.num_waiting) == (2, 2)


def test_a_call_larger_than_a_bound_is_told_so_and_not_to_try_again() -> None:
    with pytest.raises(NeverFitsError, match="4 prompts"):
        admit(make(most=3), "r0", "r1", "r2", "r3")
    with pytest.raises(NeverFitsError, match="4 prompts of class short"):
        admit(make(), "r0", "r1", "r2", "r3", prompt_len=99)


def test_a_full_class_refuses_its_own_and_no_other() -> None:
    admission = make()
    admit(admission, "r0", "r1", "r2", prompt_len=99)
    with pytest.raises(OverloadedError, match="3 requests of class short wait, at most 3 may"):
        admit(admission, "r3", prompt_len=99)
    admit(admission, "r4", prompt_len=100)
    assert waiting(admission) == {"short": 3, "long": 1}
    admission.let_in("r0", now_s=0.0)
    admit(admission, "r3", prompt_len=99)
    assert admission.report(0.0).refused[Refusal.CLASS_FULL] == 1


def test_retry_after_of_the_whole_follows_how_fast_requests_end() -> None:
    admission = make()
    admit(admission, *map(str, range(100)))
    for i in range(10):  # one every two seconds
        admission.let_in(str(i), now_s=2.0 * i)
        release(admission, str(i), now_s=2.0 * i)
        admit(admission, f"new {i}", now_s=2.0 * i)
    with pytest.raises(OverloadedError) as caught:
        admit(admission, "a", "b", "c", "d", "e", now_s=20.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)


def test_retry_after_of_a_class_follows_how_fast_its_queue_moves() -> None:
    admission = make()
    for i in range(10):  # one every three seconds, and none of them ends
        admit(admission, f"r{i}", prompt_len=99, now_s=3.0 * i)
        admission.let_in(f"r{i}", now_s=3.0 * i)
    admit(admission, "a", "b", "c", prompt_len=99, now_s=30.0)
    with pytest.raises(OverloadedError) as caught:
        admit(admission, "d", "e", prompt_len=99, now_s=30.0)
    assert caught.value.retry_after_s == pytest.approx(6.0)


def test_retry_after_is_bounded() -> None:
    admission = make(most=2)
    admit(admission, "r0", "r1")
    admission.let_in("r0", now_s=0.0)
    release(admission, "r0", now_s=0.0)
    admit(admission, "r2")
    with pytest.raises(OverloadedError) as caught:
        admit(admission, "r3", now_s=1e6)
    assert caught.value.retry_after_s == 60.0


def test_a_deadline_is_the_nearest_of_class_queue_and_whole_request() -> None:
    limits = LimitsConfig(queue_timeout_s=7.0, request_timeout_s=6.0)
    admission = Admission(limits, CLASSES)
    admit(admission, "short", prompt_len=99, now_s=1.0)
    assert admission.next_deadline_s() == 6.0
    admission.let_in("short", now_s=2.0)
    admit(admission, "long", now_s=2.0)
    assert admission.next_deadline_s() == 8.0


def test_what_waited_too_long_is_named_once_and_counted_as_refused() -> None:
    admission = make()
    admit(admission, "r0", "r1", prompt_len=99)
    assert admission.expired(4.9) is None
    names = []
    while (late := admission.expired(5.0)) is not None:
        names.append(late.request_id)
        admission.release(late.request_id, 5.0, num_output_tokens=0)
    assert names == ["r0", "r1"]
    assert (admission.num_admitted, admission.num_waiting) == (0, 0)
    assert admission.report(5.0).refused[Refusal.QUEUE_DEADLINE] == 2
    assert admission.next_deadline_s() is None


def test_a_request_that_left_before_its_turn_is_not_offered() -> None:
    admission = make()
    admit(admission, "r0", "r1")
    release(admission, "r0", now_s=1.0)
    assert offered(admission, 1.0) == ["r1"]
    assert admission.report(1.0).refused[Refusal.QUEUE_DEADLINE] == 0


def test_others_pass_one_without_room_for_a_while_only() -> None:
    admission = make()
    admit(admission, "long")
    admit(admission, "short", prompt_len=99)
    admit(admission, "other", tenant="b")
    assert offered(admission, 10.0) == ["long", "short", "other"]
    admission.found_no_room("long", 10.0)
    admission.found_no_room("long", 11.0)
    assert offered(admission, 10.0 + OVERTAKE_S) == ["long", "short", "other"]
    assert offered(admission, 10.1 + OVERTAKE_S) == ["long"]
    admission.let_in("long", now_s=13.0)
    assert offered(admission, 13.0)[1:]


def test_who_waits_for_something_else_than_room_holds_up_nobody() -> None:
    admission = make()
    admit(admission, "first")
    admit(admission, "other", tenant="b")
    assert offered(admission, 0.0) == offered(admission, 100.0) == ["first", "other"]


def test_a_tenant_is_charged_what_answers_have_been_costing() -> None:
    admission = make()
    for i in range(500):
        admit(admission, f"r{i}")
        admission.let_in(f"r{i}", now_s=0.0)
        admission.release(f"r{i}", 0.0, num_output_tokens=20)
    wanted = {"r": Demand(prompt_len=100, max_tokens=4000, num_choices=2)}
    admission.admit(wanted, tenant="a", priority=0, now_s=0.0)
    (ticket,) = admission.candidates(0.0)
    assert ticket.work == pytest.approx(140.0, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "default", "prompt_len", "granted"),
    [
        (None, None, 10, 90),
        (None, 16, 10, 16),
        (None, 16, 95, 5),
        (90, 16, 10, 90),
        (1, None, 99, 1),
    ],
)
def test_max_tokens_is_what_was_asked_or_the_default_or_the_rest(
    asked: int | None, default: int | None, prompt_len: int, granted: int
) -> None:
    fields = SamplingFields(max_tokens=asked)
    got = fit_max_tokens(
        fields, prompt_len=prompt_len, prompt_field="prompt", default=default, max_model_len=100
    )
    assert got == granted


@pytest.mark.parametrize(
    ("fields", "prompt_len", "field", "fits"),
    [
        (SamplingFields(), 100, "messages", "99 prompt tokens fit"),
        (SamplingFields(max_tokens=5), 200, "messages", "99 prompt tokens fit"),
        (SamplingFields(max_tokens=91), 10, "max_tokens", "90 fit"),
        (
            SamplingFields(max_tokens=91, max_tokens_field="max_completion_tokens"),
            10,
            "max_completion_tokens",
            "90 fit",
        ),
        (SamplingFields(min_tokens=91), 10, "min_tokens", "at most 90"),
    ],
)
def test_what_never_fits_is_refused_with_what_does(
    fields: SamplingFields, prompt_len: int, field: str, fits: str
) -> None:
    with pytest.raises(NeverFitsError, match=fits) as caught:
        fit_max_tokens(
            fields,
            prompt_len=prompt_len,
            prompt_field="messages",
            default=None,
            max_model_len=100,
        )
    assert caught.value.field == field
