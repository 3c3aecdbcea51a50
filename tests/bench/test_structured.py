"""The bench of structured output: what it asks for, and what it takes for a right answer."""

import json
import random

import httpx
import pytest
from jsonschema import Draft202012Validator

from pdserve.bench.structured.requests import judge, read_answer
from pdserve.bench.structured.schemas import make_schema
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import byte_level, save

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_every_schema_that_is_drawn_is_one_and_can_be_followed(tmp_path):
    tokenizer = Tokenizer(save(tmp_path, byte_level()))
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[0])
    draw = random.Random(0)
    for _ in range(40):
        schema = make_schema(draw)
        Draft202012Validator.check_schema(schema)
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), field="f")
        assert any(compiler.compile(grammar).mask())


@pytest.mark.parametrize(
    ("text", "reason", "problem"),
    [
        ('{"a": 1}', "stop", None),
        ('{"a": 1}', "length", "finish_reason length"),
        ('{"a": 1', "stop", "no JSON"),
        ('{"a": "1"}', "stop", "not of type 'integer'"),
        ("{}", "stop", "'a' is a required property"),
    ],
)
def test_an_answer_is_right_only_if_it_ended_parses_and_validates(text, reason, problem):
    found = judge(text, reason, SCHEMA)
    assert (found is None) == (problem is None)
    assert problem is None or problem in (found or "")


async def test_a_stream_is_read_to_its_usage():
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": '{"a":'}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": " 1}"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    answer = await read_answer(httpx.Response(200, text=body), SCHEMA, began_s=0.0)
    assert (answer.text, answer.problem, answer.num_tokens) == ('{"a": 1}', None, 7)
    assert answer.ttft_s > 0


async def test_a_refusal_is_a_wrong_answer():
    answer = await read_answer(httpx.Response(429, text="too many"), SCHEMA, began_s=0.0)
    assert answer.problem == "too many"
