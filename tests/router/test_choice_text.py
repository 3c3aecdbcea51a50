"""Tokens into text: whatever their grouping, the outcome is the same."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import FinishReason, TokenLogprobs, TokenOutput
from pdserve.text.tokenizer import Tokenizer
from router.choice_text import ChoiceText, Delta, TextRules
from tests.text.tiny_models import SAMPLES


def output(
    index: int,
    token_ids: Sequence[int],
    finish: FinishReason | None = None,
    stop_token_id: int | None = None,
) -> TokenOutput:
    return TokenOutput(
        request_id="r",
        attempt=0,
        choice=0,
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(TokenLogprobs(logprob=-float(i)) for i in range(len(token_ids))),
        finish_reason=finish,
        stop_token_id=stop_token_id,
    )


def said(
    tokenizer: Tokenizer,
    rules: TextRules,
    token_ids: Sequence[int],
    sizes: Sequence[int] = (),
    *,
    finish: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> list[Delta]:
    """Push the tokens in groups of these sizes, the rest at once, until a finish."""
    text = ChoiceText(tokenizer, rules)
    pieces, index = [], 0
    for size in (*sizes, len(token_ids)):
        group = token_ids[index : index + size]
        last = index + size >= len(token_ids)
        piece = text.push(
            output(index, group, finish if last else None, stop_token_id if last else None)
        )
        pieces.append(piece)
        index += len(group)
        if piece.finish_reason is not None:
            break
    return pieces


def joined(pieces: Sequence[Delta]) -> tuple[str, tuple[int, ...], object, object]:
    return (
        "".join(piece.text for piece in pieces),
        tuple(i for piece in pieces for i in piece.token_ids),
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
    )


@given(
    sample=st.sampled_from(SAMPLES[:-1]),
    sizes=st.lists(st.integers(min_value=1, max_value=4), max_size=30),
    stop=st.lists(st.sampled_from(["fox", " ", "ö", "界。", "Приве", "👩‍", "\n\n"]), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(min_value=0, max_value=6),
)
def test_grouping_of_tokens_changes_nothing(
    tokenizer: Tokenizer,
    sample: str,
    sizes: list[int],
    stop: list[str],
    include: bool,
    min_tokens: int,
) -> None:
    rules = TextRules(stop=tuple(stop), include_stop_str_in_output=include, min_tokens=min_tokens)
    token_ids = tokenizer.encode(sample, add_special_tokens=False)
    one_by_one = said(tokenizer, rules, token_ids, [1] * len(token_ids))
    assert joined(said(tokenizer, rules, token_ids, sizes)) == joined(one_by_one)
    for piece in one_by_one:
        assert len(piece.logprobs) == len(piece.token_ids)


def test_text_ends_before_the_stop_string_and_tokens_with_the_one_that_completed_it(
    tokenizer: Tokenizer,
) -> None:
    token_ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    text, used, finish, reason = joined(said(tokenizer, TextRules(stop=("brown",)), token_ids))
    assert text == "The quick "
    assert finish is FinishReason.STOP
    assert reason == "brown"
    assert "brown" in tokenizer.decode(used)
    assert "brown" not in tokenizer.decode(used[:-1])


def test_the_stop_string_is_kept_where_it_is_wanted(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    rules = TextRules(stop=("brown",), include_stop_str_in_output=True)
    assert joined(said(tokenizer, rules, token_ids))[0] == "The quick brown"


def test_text_that_only_began_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The quick", add_special_tokens=False)
    text, _, finish, reason = joined(said(tokenizer, TextRules(stop=("quicker",)), token_ids))
    assert (text, finish, reason) == ("The quick", FinishReason.LENGTH, None)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("fox fox fox", add_special_tokens=False)
    first = len(tokenizer.encode("fox", add_special_tokens=False))
    rules = TextRules(stop=("fox",), min_tokens=first)
    assert joined(said(tokenizer, rules, token_ids))[0] == "fox "


@pytest.mark.parametrize(("named", "reason"), [(True, "id"), (False, None)])
def test_an_end_token_has_no_text_and_is_a_reason_only_if_the_client_named_it(
    tokenizer: Tokenizer, named: bool, reason: str | None
) -> None:
    token_ids = tokenizer.encode("The fox.", add_special_tokens=False)
    end = token_ids[-1]
    rules = TextRules(stop_token_ids=frozenset([end] if named else []))
    pieces = said(tokenizer, rules, token_ids, finish=FinishReason.STOP, stop_token_id=end)
    text, used, _, got = joined(pieces)
    assert text == tokenizer.decode(token_ids[:-1])
    assert used == tuple(token_ids)
    assert got == (end if reason else None)


def test_an_end_token_has_text_where_it_is_wanted(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("The fox", add_special_tokens=False), tokenizer.eos_token_id]
    rules = TextRules(include_stop_str_in_output=True, skip_special_tokens=False)
    pieces = said(
        tokenizer,
        rules,
        [token_id for token_id in token_ids if token_id is not None],
        finish=FinishReason.STOP,
        stop_token_id=tokenizer.eos_token_id,
    )
    assert joined(pieces)[0] == "The fox<|end|>"
