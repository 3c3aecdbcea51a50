"""Grammars beside a node's loop, with a tiny tokenizer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from decode_node.grammars import (
    Complete,
    Ends,
    Failed,
    Grammars,
    GrammarState,
    MaskKnown,
    start_grammars,
)
from pdserve.core.request import Grammar, GrammarKind, RequestKey
from pdserve.text.grammar import GrammarCompiler, allows
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import byte_level, save

KEY = RequestKey("r0", 0)
END = 0  # <|end|>
NO_ENDS = Ends(token_ids=(END,), min_tokens=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp("model"), byte_level()))


@pytest.fixture
def load(tokenizer: Tokenizer) -> Callable[[], GrammarCompiler]:
    size = tokenizer.vocab_size
    return lambda: GrammarCompiler(tokenizer, vocab_size=size, eos_token_ids=[END])


@asynccontextmanager
async def opened(load: Callable[[], GrammarCompiler]) -> AsyncIterator[Grammars]:
    grammars = await start_grammars(load)
    try:
        yield grammars
    finally:
        grammars.close()


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text, field="guided_regex")


async def begun(grammars: Grammars, text: str, **options) -> GrammarState:
    ends, outputs = options.get("ends", NO_ENDS), options.get("outputs", ())
    state = grammars.begin(KEY, regex(text), outputs, ends)
    if state.mask is None:
        assert await grammars.next_news() == MaskKnown()
    return state


async def follow(grammars: Grammars, state: GrammarState, ids: list[int]) -> list[bool]:
    """Take tokens in, each of which must be allowed."""
    ended = []
    for token_id in ids:
        assert state.mask is not None
        assert allows(state.mask, token_id)
        ended.append(state.advance(token_id))
        await grammars.settle(10.0)
    return ended


async def test_only_what_the_grammar_allows_is_in_the_mask_and_the_end_completes_it(
    load, tokenizer
):
    async with opened(load) as grammars:
        state = await begun(grammars, "[ab]{3}")
        assert state.mask is not None
        allowed = {tokenizer.token_text(i) for i in range(600) if allows(state.mask, i)}
        assert {"a", "b"} <= allowed
        assert all(set(text) <= {"a", "b"} for text in allowed)
        ids = tokenizer.encode("b", add_special_tokens=False) * 3
        assert await follow(grammars, state, ids) == [False, False, True]


async def test_an_end_is_allowed_only_where_the_answer_may_end_and_not_before_min_tokens(
    load, tokenizer
):
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    async with opened(load) as grammars:
        state = await begun(grammars, "a+", ends=Ends(token_ids=(END,), min_tokens=2))
        seen = []
        for _ in range(3):
            assert state.mask is not None
            seen.append(allows(state.mask, END))
            await follow(grammars, state, [a])
        assert seen == [False, False, True]


async def test_where_nothing_but_the_end_may_come_min_tokens_does_not_forbid_it(load, tokenizer):
    ends = Ends(token_ids=tuple(range(tokenizer.vocab_size)), min_tokens=9)
    async with opened(load) as grammars:
        state = await begun(grammars, "a", ends=ends)
        assert state.mask is not None
        assert any(state.mask)


async def test_a_grammar_that_was_seen_is_known_at_once(load):
    async with opened(load) as grammars:
        first = await begun(grammars, "[ab]+")
        again = grammars.begin(KEY, regex("[ab]+"), (), NO_ENDS)
        assert again.mask == first.mask


async def test_a_copy_goes_its_own_way(load, tokenizer):
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    async with opened(load) as grammars:
        state = await begun(grammars, "ab|ba")
        copy = state.copy()
        await follow(grammars, state, [a])
        await follow(grammars, copy, [b])
        assert await follow(grammars, state, [b]) == [True]
        assert await follow(grammars, copy, [a]) == [True]


async def test_it_goes_on_after_the_tokens_that_the_client_has(load, tokenizer):
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    async with opened(load) as grammars:
        whole, moved = (
            await begun(grammars, "[ab]{3}"),
            await begun(grammars, "[ab]{3}", outputs=(a, a)),
        )
        await follow(grammars, whole, [a, a])
        assert moved.mask == whole.mask
        assert await follow(grammars, moved, [b]) == [True]


@pytest.mark.parametrize(
    ("text", "outputs", "news"),
    [
        ("a{2}", "aa", Complete),  # all of it is there, only the end was lost
        ("a{2}", "ab", Failed),
        ("(", "", Failed),
    ],
)
async def test_what_cannot_go_on_is_told_with_its_request(load, tokenizer, text, outputs, news):
    ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in outputs]
    async with opened(load) as grammars:
        state = grammars.begin(KEY, regex(text), ids, NO_ENDS)
        told = await grammars.next_news()
        assert isinstance(told, news)
        assert told.key == KEY if isinstance(told, Complete) else told.state is state
        if isinstance(told, Failed):
            assert told.error.kind == "invalid_request_error"
            assert str(told.error).startswith("guided_regex: ")


async def test_a_token_that_does_not_follow_ends_the_request_by_name(load, tokenizer):
    (b,) = tokenizer.encode("b", add_special_tokens=False)
    async with opened(load) as grammars:
        state = await begun(grammars, "a+")
        assert state.advance(b) is False
        assert state.mask is None
        told = await grammars.next_news()
        assert isinstance(told, Failed)
        assert told.error.kind == "internal_error"


async def test_a_way_of_a_grammar_that_has_no_end_ends_the_request_by_its_field(load, tokenizer):
    endless = 'root ::= "b" | "a" more\nmore ::= "a" more'
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    async with opened(load) as grammars:
        grammar = Grammar(kind=GrammarKind.EBNF, text=endless, field="guided_grammar")
        state = grammars.begin(KEY, grammar, (), NO_ENDS)
        told = await asyncio.wait_for(grammars.next_news(), 10)
        while told == MaskKnown():
            assert state.advance(a) is False
            told = await asyncio.wait_for(grammars.next_news(), 10)
        assert isinstance(told, Failed)
        assert told.error.kind == "invalid_request_error"
        assert str(told.error).startswith("guided_grammar: ")


async def test_a_compiler_that_cannot_be_made_fails_the_requests_and_nobody_else():
    def load() -> GrammarCompiler:
        raise OSError("no such file")

    async with opened(load) as grammars:
        grammars.begin(KEY, regex("a"), (), NO_ENDS)
        told = await asyncio.wait_for(grammars.next_news(), 10)
        assert isinstance(told, Failed)
        assert told.error.kind == "internal_error"
