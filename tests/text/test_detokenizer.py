"""Streams of tokens give exactly the text of the whole, and give it soon."""

import random
import sys
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.detokenizer import StreamDetokenizer
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import KINDS, SAMPLES, every_block

KIND_NAMES = list(KINDS)


def streamed(tokenizer: Tokenizer, groups: list[list[int]], *, skip: bool = True) -> list[str]:
    stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(group) for group in groups), stream.flush()]


def one_by_one(token_ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in token_ids]


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("text", [*SAMPLES, "\n".join(SAMPLES), every_block()])
def test_text_of_any_script_comes_out_as_it_is_decoded_at_once(tokenizers_by_kind, kind, text):
    tokenizer = tokenizers_by_kind[kind]
    token_ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, one_by_one(token_ids))
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if kind == "byte level":
        assert "".join(pieces) == text


@pytest.mark.parametrize("kind", [kind for kind in KIND_NAMES if kind != "words"])
def test_no_replacement_character_is_sent_for_a_character_in_parts(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    token_ids = tokenizer.encode("".join(SAMPLES).replace("\ufffd", "") + every_block()[:2000])
    assert len(token_ids) > 2000
    assert not any("\ufffd" in piece for piece in streamed(tokenizer, one_by_one(token_ids)))


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=150)
def test_random_tokens_in_random_groups_give_what_is_decoded_at_once(
    tokenizers_by_kind, kind, skip, data
):
    tokenizer = tokenizers_by_kind[kind]
    some_id = st.integers(0, tokenizer.vocab_size + 3)
    byte_id = st.integers(3, 258)  # where the byte tokens are
    groups = data.draw(
        st.lists(st.lists(st.one_of(some_id, byte_id), max_size=6), max_size=12), label="groups"
    )
    expected = tokenizer.decode(list(chain(*groups)), skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, groups, skip=skip)) == expected


@given(content=st.binary(max_size=40), seed=st.integers(0, 1000))
@settings(max_examples=300)
def test_any_bytes_give_what_is_decoded_at_once(tokenizers_by_kind, content, seed):
    for kind in ("byte level", "byte fallback"):
        tokenizer = tokenizers_by_kind[kind]
        id_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
        token_ids = [id_of[bytes([byte])] for byte in content]
        cuts = sorted(random.Random(seed).choices(range(len(content) + 1), k=3))
        groups = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        assert "".join(streamed(tokenizer, groups)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_byte_level_text_is_held_back_by_less_than_a_character(tokenizers_by_kind, text):
    tokenizer = tokenizers_by_kind["byte level"]
    token_ids = tokenizer.encode(text)
    stream, sent = StreamDetokenizer(tokenizer), ""
    for end, token_id in enumerate(token_ids, start=1):
        sent += stream.push([token_id])
        assert sent == tokenizer.decode(token_ids[:end]).removesuffix("\ufffd")


@pytest.mark.parametrize("kind", ["byte fallback", "metaspace"])
def test_the_space_of_a_first_word_goes_only_at_the_start_of_a_text(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    prompt, rest = tokenizer.encode("The quick"), tokenizer.encode("fox jumps")
    assert "".join(streamed(tokenizer, [rest])) == "fox jumps"
    stream = StreamDetokenizer(tokenizer, after=prompt)
    assert stream.push(rest) + stream.flush() == " fox jumps"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_nothing_of_the_tokens_before_is_put_out(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    bird = [i for i in tokenizer.encode("𓀀") if tokenizer.token_bytes(i) not in (b" ", b"")]
    for end in range(1, len(bird) + 1):
        stream = StreamDetokenizer(tokenizer, after=bird[:end])
        word = tokenizer.encode("fox")
        assert (stream.push(word) + stream.flush()).strip() == "fox"


def test_special_tokens_are_put_out_only_when_asked_for(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte level"]
    token_ids = tokenizer.encode("<|start|>fox<|a b|><plain added><|end|>")
    assert "".join(streamed(tokenizer, [token_ids])) == "fox<plain added>"
    kept = "".join(streamed(tokenizer, [token_ids], skip=False))
    assert kept == "<|start|>fox<|a b|><plain added><|end|>"


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_token_costs_the_same_early_and_late(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    word = tokenizer.encode("The quick fox.")
    stream = StreamDetokenizer(tokenizer)

    def num_calls() -> int:
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            stream.push(word)
        finally:
            sys.setprofile(None)
        return len(calls)

    def fewest_calls() -> int:  # what the garbage collector calls now and then is not ours
        return min(num_calls() for _ in range(5))

    stream.push(word)
    early = fewest_calls()
    for _ in range(2000):
        stream.push(word)
    assert fewest_calls() == early
    assert len(stream.flush()) < 8
