"""Whatever core types hold comes back from a session message as it was, unset apart from zero."""

import dataclasses
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    HandoffId,
    PromptLogprob,
    PromptOutput,
    Request,
    RequestFailure,
    Route,
    RouteTaken,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from pdserve.core.timeline import Stage, Timeline
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2

M = TypeVar("M", bound=Message)

COUNTS = st.integers(0, 2**32 - 1)
NUMBERS = st.floats(allow_nan=False)
TOKEN_IDS = st.lists(COUNTS, max_size=6).map(tuple)
SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=COUNTS,
    min_tokens=COUNTS,
    temperature=NUMBERS,
    top_p=NUMBERS,
    top_k=st.none() | COUNTS,
    min_p=NUMBERS,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    repetition_penalty=NUMBERS,
    logit_bias=st.lists(st.tuples(COUNTS, NUMBERS), max_size=4).map(tuple),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=TOKEN_IDS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | COUNTS,
    prompt_logprobs=st.none() | COUNTS,
)
REQUESTS = st.builds(
    Request,
    request_id=st.text(),
    attempt=COUNTS,
    token_ids=TOKEN_IDS,
    prompt_len=COUNTS,
    choices=TOKEN_IDS,
    sampling=SAMPLINGS,
    route=st.builds(
        Route,
        decode_node=st.text(),
        prefill_nodes=st.lists(st.text(), max_size=3).map(tuple),
        local_allowed=st.booleans(),
        lane=COUNTS,
    ),
    grammar=st.none()
    | st.builds(Grammar, kind=st.sampled_from(GrammarKind), text=st.text(), field=st.text()),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    logprob=NUMBERS,
    top=st.lists(st.tuples(COUNTS, NUMBERS), max_size=4).map(tuple),
)
OUTPUTS = st.builds(
    TokenOutput,
    request_id=st.text(),
    attempt=COUNTS,
    choice=COUNTS,
    index=COUNTS,
    token_ids=TOKEN_IDS,
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | COUNTS,
)
PROMPT_OUTPUTS = st.builds(
    PromptOutput,
    request_id=st.text(),
    attempt=COUNTS,
    index=COUNTS,
    logprobs=st.lists(
        st.builds(
            PromptLogprob,
            logprob=NUMBERS,
            rank=COUNTS,
            top=st.lists(st.tuples(COUNTS, NUMBERS), max_size=4).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)
FAILURES = st.builds(
    RequestFailure,
    request_id=st.text(),
    attempt=COUNTS,
    kind=st.text(),
    message=st.text(),
    retryable=st.booleans(),
)
TIMELINES = st.builds(
    Timeline,
    route=st.sampled_from(RouteTaken),
    stages=st.lists(
        st.builds(Stage, name=st.text(), node=st.text(), duration_s=NUMBERS), max_size=4
    ).map(tuple),
    kv_bytes=st.integers(0, 2**64 - 1),
    transport=st.none() | st.text(min_size=1),
    num_preemptions=COUNTS,
)


def through_the_wire(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


def to_proto(output: TokenOutput) -> session_pb2.TokenOutput:
    message = session_pb2.TokenOutput()
    convert.fill_output(message, output)
    return message


@given(SAMPLINGS)
def test_sampling_comes_back_as_it_was(sampling: SamplingParams):
    message = through_the_wire(convert.sampling_to_proto(sampling))
    assert convert.sampling_from_proto(message) == sampling


@given(REQUESTS)
def test_a_request_comes_back_as_it_was(request: Request):
    message = through_the_wire(convert.request_to_proto(request))
    again = convert.request_from_proto(message)
    assert again == request
    assert again.key == request.key


@given(OUTPUTS)
def test_an_output_comes_back_as_it_was(output: TokenOutput):
    again = convert.output_from_proto(through_the_wire(to_proto(output)))
    assert again == output
    assert again.finish_reason is output.finish_reason


@given(PROMPT_OUTPUTS)
def test_what_is_told_of_a_prompt_comes_back_as_it_was(output: PromptOutput):
    message = through_the_wire(convert.prompt_output_to_proto(output))
    assert convert.prompt_output_from_proto(message) == output


@given(FAILURES)
def test_a_failure_comes_back_as_it_was(failure: RequestFailure):
    message = through_the_wire(convert.failure_to_proto(failure))
    assert convert.failure_from_proto(message) == failure


@given(TIMELINES)
def test_a_timeline_comes_back_as_it_was(timeline: Timeline):
    message = through_the_wire(convert.timeline_to_proto(timeline))
    assert convert.timeline_from_proto(message) == timeline


@given(st.builds(HandoffId, st.text(), COUNTS, COUNTS))
def test_the_name_of_a_handoff_comes_back_as_it_was(handoff: HandoffId):
    message = through_the_wire(convert.handoff_to_proto(handoff))
    assert convert.handoff_from_proto(message) == handoff


@pytest.mark.parametrize("key", ["top_k", "logprobs", "prompt_logprobs"])
def test_unset_is_not_zero(key: str):
    unset = SamplingParams(max_tokens=1)
    zero = dataclasses.replace(unset, **{key: 0})  # type: ignore[arg-type]
    assert convert.sampling_from_proto(convert.sampling_to_proto(unset)) == unset
    assert convert.sampling_from_proto(convert.sampling_to_proto(zero)) == zero


def test_the_first_token_of_the_vocabulary_can_be_the_one_that_stopped():
    output = TokenOutput(
        request_id="r", attempt=0, choice=0, index=0, token_ids=(0,), stop_token_id=0
    )
    assert convert.output_from_proto(to_proto(output)).stop_token_id == 0
