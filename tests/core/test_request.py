"""The names of requests and handoffs, and what sampling asks of the ranks."""

import dataclasses

import pytest

from pdserve.core.request import (
    FinishReason,
    HandoffId,
    Request,
    RequestFailure,
    RequestKey,
    Route,
    RouteTaken,
    SamplingParams,
    TokenOutput,
)


def test_an_attempt_has_one_name_in_everything_that_speaks_of_it():
    route = Route(decode_node="decode-0", prefill_nodes=(), local_allowed=True)
    request = Request(
        request_id="r",
        attempt=3,
        token_ids=(1,),
        prompt_len=1,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        route=route,
    )
    output = TokenOutput(request_id="r", attempt=3, choice=0, index=0, token_ids=(5,))
    failure = RequestFailure(request_id="r", attempt=3, kind="k", message="m", retryable=True)
    assert request.key == output.key == failure.key == HandoffId("r", 3, 7).key
    assert request.key == RequestKey("r", 3)


def test_attempts_and_legs_are_told_apart():
    assert RequestKey("r", 0) != RequestKey("r", 1)
    assert HandoffId("r", 0, 1) != HandoffId("r", 0, 2)


@pytest.mark.parametrize(
    ("penalties", "needed"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 1.0, "presence_penalty": 0.0}, False),
    ],
)
def test_tokens_are_counted_only_for_penalties(penalties: dict[str, float], needed: bool):
    assert SamplingParams(max_tokens=1, **penalties).needs_history is needed  # type: ignore[arg-type]


def test_words_of_the_api_are_their_values():
    assert [*map(str, FinishReason)] == ["stop", "length", "abort"]
    assert [*map(str, RouteTaken)] == ["disaggregated", "local", "fallback"]


def test_what_travels_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams(max_tokens=1).max_tokens = 2  # type: ignore[misc]
