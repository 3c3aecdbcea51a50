"""Streamed text is the whole text: any tokens, any script, any stop strings, on every route."""

import json
import unicodedata
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.core.request import FinishReason
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.text.tokenizer import Tokenizer
from router.choice_text import TextRules
from tests.router.conftest import World, WorldMaker
from tests.router.sse import events_of, text_of
from tests.router.test_choice_text import joined, said
from tests.text.conftest import tokenizers_by_kind
from tests.text.test_stop_strings import character_by_character
from tests.text.tiny_models import KINDS, SAMPLES, every_block

__all__ = ["tokenizers_by_kind"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 3600.0
LETTERS = every_block()  # of every script that there is


async def test_the_letters_are_of_every_script() -> None:
    scripts = {unicodedata.name(char, "").split(" ")[0] for char in LETTERS}
    assert len(scripts) > 200


@pytest.fixture(scope="module")
def real(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


def stops_in(data: st.DataObject, text: str) -> list[str]:
    """Some pieces of the text, and some that are not in it."""
    stops = data.draw(st.lists(st.sampled_from(["fox", "\ufffd", " ", "界。", "👩‍"]), max_size=2))
    if text:
        for _ in range(data.draw(st.integers(0, 2))):
            start = data.draw(st.integers(0, len(text) - 1))
            stops.append(text[start : start + data.draw(st.integers(1, 6))])
    return stops


def drawn_tokens(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Tokens at random, or those of letters of all scripts, perhaps cut within a letter."""
    if data.draw(st.booleans()):
        some_id = st.integers(0, tokenizer.vocab_size - 1)
        return data.draw(st.lists(some_id, min_size=1, max_size=40))
    letters = st.sampled_from(LETTERS) | st.sampled_from("".join(SAMPLES))
    text = "".join(data.draw(st.lists(letters, min_size=1, max_size=30)))
    ids = tokenizer.encode(text, add_special_tokens=False) or [0]
    start = data.draw(st.integers(0, len(ids) - 1))
    return ids[start:]


def check_cut(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """The streamed pieces, joined, are the whole text up to the first stop string."""
    ids = drawn_tokens(data, tokenizer)
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    stops, include = stops_in(data, whole), data.draw(st.booleans())
    rules = TextRules(
        stop=tuple(stops), include_stop_str_in_output=include, skip_special_tokens=skip
    )
    expected, matched = character_by_character(whole, stops, include)
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=30))
    for groups in ([1] * len(ids), sizes):
        text, _, finish, reason = joined(said(tokenizer, rules, ids, groups))
        assert (text, reason) == (expected, matched)
        assert finish is (FinishReason.LENGTH if matched is None else FinishReason.STOP)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
@given(data=st.data())
async def test_stop_strings_cut_any_tokens_where_they_cut_the_text(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    check_cut(data, tokenizers_by_kind[kind])


@pytest.mark.model
@settings(max_examples=300)
@given(data=st.data())
async def test_stop_strings_cut_the_real_models_tokens_alike(
    real: Tokenizer, data: st.DataObject
) -> None:
    check_cut(data, real)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting(make_world: WorldMaker) -> AsyncIterator[World]:
    async with make_world(silence_s=PATIENCE_S) as made:
        yield made


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_every_route_streams_the_text_that_it_gives_whole(
    lasting: World, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = drawn_tokens(data, tokenizer)
    stops = stops_in(data, tokenizer.decode(ids))
    lasting.decode[0].answer_ids = tuple(ids)
    fields = {"max_tokens": len(ids), "ignore_eos": True, "stop": stops[:4]}
    whole = (await lasting.complete(prompt=[5], **fields)).json()["choices"][0]["text"]
    assert text_of(events_of(await lasting.complete(prompt=[5], stream=True, **fields))) == whole
    chat = (await lasting.chat(**fields)).json()["choices"][0]["message"]["content"]
    assert text_of(events_of(await lasting.chat(stream=True, **fields))) == chat
    assert await over_grpc(lasting, ids, stops[:4]) == whole
    if not stops and tokenizer.eos_token_id not in ids:
        assert await responses(lasting, ids) == chat


async def over_grpc(world: World, ids: Sequence[int], stops: list[str]) -> str:
    sampling = pb.SamplingParams(max_tokens=len(ids), ignore_eos=True, stop=stops)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return "".join([message.text async for message in stub.Generate(request)])


async def responses(world: World, ids: Sequence[int]) -> str:
    body = {"input": "Hello", "max_output_tokens": len(ids), "stream": True}
    answer = await world.http.post("/v1/responses", json=body)
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    return "".join(each["delta"] for each in events if each["type"].endswith("text.delta"))
