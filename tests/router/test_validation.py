"""Which values are let through, and what is said of the others."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequestError
from router.validation import (
    SamplingFields,
    check_sampling,
    check_token_ids,
    parse_prompts,
    to_sampling_params,
)

VOCAB = 100
GOOD = SamplingFields()

WRONG: list[tuple[str, object]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("logit_bias", {100: 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {"\u0661": 1.0}),  # a digit, but not ASCII
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", dict.fromkeys(range(301), 0.0)),
    ("seed", 2**63),
    ("stop", ("x",) * 17),
    ("stop", ("ok", "")),
    ("stop", ("x" * 257,)),
    ("stop_token_ids", (100,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1,) * 129),
    ("logprobs", 21),
    ("logprobs", -1),
    ("cache_salt", ""),
    ("cache_salt", "x" * 257),
    ("n", 0),
    ("n", 5),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    fields = replace(GOOD, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(fields, vocab_size=VOCAB, max_n=4)
    assert caught.value.field.startswith(field)
    assert len(str(caught.value)) < 300


def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    fields = replace(GOOD, min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        check_sampling(fields, vocab_size=VOCAB, max_n=4)


def test_an_error_uses_the_name_that_the_api_gave_the_field() -> None:
    fields = replace(GOOD, logprobs=21, logprobs_field="top_logprobs")
    with pytest.raises(InvalidRequestError, match="top_logprobs"):
        check_sampling(fields, vocab_size=VOCAB, max_n=4)


def test_what_is_not_given_has_vllms_default() -> None:
    check_sampling(GOOD, vocab_size=VOCAB, max_n=1)
    params = to_sampling_params(GOOD, max_tokens=7, seed=3)
    assert (params.max_tokens, params.seed) == (7, 3)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (params.top_k, params.logprobs) == (None, None)


def test_zero_is_not_unset() -> None:
    fields = replace(GOOD, temperature=0.0, seed=0, logprobs=0)
    params = to_sampling_params(fields, max_tokens=7, seed=3)
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_zero_and_minus_one_mean_all_tokens(top_k: int) -> None:
    assert to_sampling_params(replace(GOOD, top_k=top_k), max_tokens=1, seed=0).top_k is None


def test_a_temperature_near_zero_is_greedy() -> None:
    params = to_sampling_params(replace(GOOD, temperature=1e-300), max_tokens=1, seed=0)
    assert params.temperature == 0.0


@given(st.integers(min_value=-(2**63), max_value=2**63 - 1))
def test_any_64_bit_seed_becomes_one_that_nodes_take(seed: int) -> None:
    fields = replace(GOOD, seed=seed)
    check_sampling(fields, vocab_size=VOCAB, max_n=1)
    params = to_sampling_params(fields, max_tokens=1, seed=0)
    assert 0 <= params.seed < 2**63
    assert seed < 0 or params.seed == seed


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["Hi", [1]], ["Hi", (1,)]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(
    prompt: object, parsed: list[object]
) -> None:
    assert parse_prompts(prompt, vocab_size=VOCAB, max_prompts=4) == parsed


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (7, "prompt"),
        ({"a": 1}, "prompt"),
        (["Hi", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([1, 100], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([10**5000], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1, "x"], "prompt[1]"),
        ([[1, 2.0]], "prompt[0][1]"),
        ([[["x"]]], "prompt[0][0]"),
        ([None], "prompt[0]"),
        ([True], "prompt[0]"),
        (["x"] * 5, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused_by_position(prompt: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompts(prompt, vocab_size=VOCAB, max_prompts=4)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


IDS = st.integers(0, VOCAB - 1)
NO_IDS = st.one_of(
    st.booleans(),
    st.integers(max_value=-1),
    st.integers(VOCAB),
    st.floats(),
    st.none(),
    st.text(max_size=3),
    st.lists(IDS, max_size=2),
)


@given(st.lists(IDS))
def test_ids_of_the_vocabulary_are_taken_as_they_are(ids: list[int]) -> None:
    assert check_token_ids("prompt", ids, VOCAB) == tuple(ids)


@given(st.lists(IDS, max_size=5), NO_IDS, st.lists(st.one_of(IDS, NO_IDS), max_size=5))
def test_the_first_that_is_no_id_is_named(
    before: list[int], wrong: object, after: list[object]
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_token_ids("prompt", [*before, wrong, *after], VOCAB)
    assert refused.value.field == f"prompt[{len(before)}]"
