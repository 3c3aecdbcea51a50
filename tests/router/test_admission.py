"""How many are let in, and what can never fit."""

import pytest

from pdserve.core.errors import NeverFitsError, OverloadedError
from router.admission import Admission, fit_max_tokens
from router.validation import SamplingFields


def test_requests_are_let_in_up_to_the_bound_and_again_after_a_release() -> None:
    admission = Admission(2)
    admission.admit(2, now_s=0.0)
    with pytest.raises(OverloadedError, match="at most 2"):
        admission.admit(1, now_s=0.0)
    admission.release(now_s=1.0)
    admission.admit(1, now_s=1.0)
    assert admission.num_admitted == 2


def test_prompts_of_one_call_are_let_in_together_or_not_at_all() -> None:
    admission = Admission(3)
    admission.admit(2, now_s=0.0)
    with pytest.raises(OverloadedError):
        admission.admit(2, now_s=0.0)
    assert admission.num_admitted == 2


def test_a_call_larger_than_the_bound_is_told_so_and_not_to_try_again() -> None:
    with pytest.raises(NeverFitsError, match="4 prompts"):
        Admission(3).admit(4, now_s=0.0)


def test_retry_after_follows_how_fast_requests_end() -> None:
    admission = Admission(100)
    admission.admit(100, now_s=0.0)
    for i in range(10):  # one every two seconds
        admission.release(now_s=2.0 * i)
        admission.admit(1, now_s=2.0 * i)
    with pytest.raises(OverloadedError) as caught:
        admission.admit(5, now_s=20.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)


def test_retry_after_is_bounded() -> None:
    admission = Admission(2)
    admission.admit(2, now_s=0.0)
    admission.release(now_s=0.0)
    admission.admit(1, now_s=0.0)
    with pytest.raises(OverloadedError) as caught:
        admission.admit(1, now_s=1e6)
    assert caught.value.retry_after_s == 60.0


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
