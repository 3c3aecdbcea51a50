"""One cluster as users have it: routes by length, the openai package, a rank that dies."""

import os
import signal
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pdserve.client.async_client import AsyncClient
from tests.cluster.conftest import LOCAL_BELOW
from tests.cluster.golden import CASES, SHORT_CASES, ask_all, first_difference
from tests.cluster.processes import descendants, listener
from tests.cluster.served import Served

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]

LONG_ANSWER = CASES[5]  # 36 prompt tokens, 64 output tokens
MODEL = "smollm2-135m-instruct"
CAPITAL: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
CAPITAL_ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(cluster: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none") as client:
        yield client


def test_short_prompts_stay_and_long_ones_are_handed_over(cluster: Served) -> None:
    for case, answer in zip(SHORT_CASES, ask_all(cluster, SHORT_CASES), strict=True):
        is_local = len(case["prompt_token_ids"]) < LOCAL_BELOW
        assert answer["timeline"]["route"] == ("local" if is_local else "disaggregated")
        assert (answer["timeline"]["kv_bytes"] == 0) == is_local


def test_the_openai_package_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    assert answer.choices[0].message.content == CAPITAL_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (42, 8)


def test_the_openai_package_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CAPITAL,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == CAPITAL_ANSWER
    assert sum(bool(piece) for piece in pieces) > 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_the_openai_package_completes_with_logprobs(client: openai.OpenAI) -> None:
    case = SHORT_CASES[3]
    answer = client.completions.create(
        model=MODEL, prompt=case["prompt"], max_tokens=5, temperature=0, logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 5
    assert logprobs.token_logprobs[0] == pytest.approx(case["first_top5"][0][1], abs=1e-3)


def test_logprobs_of_a_prompt_are_the_references_on_each_route(cluster: Served) -> None:
    """Its last token is the likeliest after the others, so the reference's five are its rivals."""
    routes = set()
    for case in SHORT_CASES:
        expected = {str(token): logprob for token, logprob in case["first_top5"]}
        best = case["first_top5"][0][0]
        body = {"prompt": [*case["prompt_token_ids"], best], "max_tokens": 1, "timeline": True}
        answer = cluster.post("/v1/completions", body | {"prompt_logprobs": 5})
        first, *told = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert len(told) == len(case["prompt_token_ids"])
        found = {token: item["logprob"] for token, item in told[-1].items()}
        assert found == pytest.approx(expected, abs=1e-3)
        assert told[-1][str(best)]["rank"] == 1
        routes.add(answer["timeline"]["route"])
    assert routes == {"local", "disaggregated"}


def test_the_openai_package_gets_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, n=2, temperature=1.0, seed=7, max_tokens=12
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_the_openai_package_stops_at_a_string(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, stop=[" is"]
    )
    assert answer.choices[0].message.content == "The capital of France"
    assert answer.choices[0].finish_reason == "stop"


def test_the_openai_package_sees_errors_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=CAPITAL)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_whose_rank_is_killed_is_made_anew_and_serves(cluster: Served, role: str) -> None:
    name = f"{role}-0"
    before = {node["name"]: node["ranks"][0]["pid"] for node in cluster.status()["nodes"]}
    os.kill(before[name], signal.SIGKILL)
    cluster.wait_for(f"cluster +{name} ended", timeout_s=10)
    cluster.wait_for(f"cluster +{name} serves again", timeout_s=120)
    cluster.wait_until_idle()
    routes = [answer["timeline"]["route"] for answer in ask_all(cluster, SHORT_CASES)]
    assert "disaggregated" in routes
    after = {node["name"]: node["ranks"][0]["pid"] for node in cluster.status()["nodes"]}
    assert [name] == [node for node in before if before[node] != after[node]]


def test_prompts_are_answered_while_there_is_no_prefill_node(cluster: Served) -> None:
    prefill = next(node for node in cluster.status()["nodes"] if node["role"] == "prefill")
    os.kill(prefill["ranks"][0]["pid"], signal.SIGKILL)
    cluster.wait_for("cluster +prefill-0 ended", timeout_s=10)
    routes = [answer["timeline"]["route"] for answer in ask_all(cluster, SHORT_CASES)]
    assert set(routes) <= {"local", "fallback"}
    cluster.wait_for("cluster +prefill-0 serves again", timeout_s=120)


async def test_a_stream_goes_on_where_it_was_when_its_decode_node_dies(cluster: Served) -> None:
    case = LONG_ANSWER
    decode = next(node for node in cluster.status()["nodes"] if node["role"] == "decode")
    got: list[int] = []
    async with AsyncClient(cluster.grpc_address) as client:
        async for chunk in client.generate(
            case["prompt_token_ids"], stream=True, max_tokens=case["max_tokens"], temperature=0.0
        ):
            if not got:
                os.kill(decode["ranks"][0]["pid"], signal.SIGKILL)
            got += chunk.token_ids
    assert first_difference(case, got) is None
    cluster.wait_for("cluster +decode-0 serves again", timeout_s=120)
    cluster.wait_until_idle()


def test_a_router_that_is_killed_comes_back_at_its_address(cluster: Served) -> None:
    port = int(cluster.http_url.rpartition(":")[2])
    os.kill(listener(descendants(cluster.process.pid), port), signal.SIGKILL)
    cluster.wait_for("cluster +router ended", timeout_s=10)
    cluster.wait_for("cluster +router serves again", timeout_s=120)
    cluster.wait_until_idle()
    ask_all(cluster, SHORT_CASES)
