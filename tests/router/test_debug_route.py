"""``/debug/route``: the decision and what it was made of, and nothing is done."""

import logging
from typing import Any

import httpx
import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.request import FinishReason, Request
from pdserve.core.routing_config import ConditionalConfig, PrefixConfig, SloConfig
from tests.router.conftest import World, WorldMaker, error_of
from tests.router.fake_nodes import FakeDecodeNode, FakeSession

LONG = [5] * 130


async def ask(world: World, **fields: Any) -> dict[str, Any]:
    response = await world.http.get("/debug/route", params=fields)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


async def counted(world: World) -> list[str]:
    """The router's metrics without those of its process, which time moves on."""
    text = (await world.http.get("/metrics")).text
    return [line for line in text.splitlines() if "process_" not in line]


async def test_a_length_is_routed_and_nothing_is_placed(make_world: WorldMaker) -> None:
    async with make_world(num_prefill=1, num_decode=2) as world:
        before = await counted(world)
        told = await ask(world, prompt_len=100)
        assert told["planned"] == "disaggregated"
        assert told["rule"] == "prefill_node"
        assert (told["decode_node"], told["prefill_nodes"]) == ("decode-0", ["prefill-0"])
        assert told["prompt_class"] == "short"
        assert not told["degraded"]
        assert "prefill-0" in told["explain"]
        assert told["predicted"] == {
            "decode_node": "decode-0",
            "prefill_node": "prefill-0",
            "ttft_ms": 100.0,
            "tpot_ms": 10.0,
            "neighbours_ms": None,
            "transfer_ms": 10.0,
        }
        ways = [(way["decode_node"], way["prefill_node"]) for way in told["candidates"]]
        assert ways == [
            (decode, prefill)
            for decode in ("decode-0", "decode-1")
            for prefill in (None, "prefill-0")
        ]
        assert not [node for node in world.decode if node.submitted]
        assert await counted(world) == before


async def test_the_limits_of_a_request_decide_under_slo(make_world: WorldMaker) -> None:
    routing = RouterConfig(policy="slo", slo=SloConfig(ttft_ms=1000.0, tpot_ms=50.0))
    async with make_world(num_prefill=1, routing=routing) as world:
        for limits in ({}, {"ttft_slo_ms": 500, "tpot_slo_ms": 25}):
            told = await ask(world, prompt_len=200, **limits)
            ttft, tpot = limits.get("ttft_slo_ms", 1000), limits.get("tpot_slo_ms", 50)
            assert f"first token in 200 ms of {ttft} ms" in told["explain"]
            assert f"between tokens 10 ms of {tpot} ms" in told["explain"]


async def test_a_prompt_is_routed_with_what_was_sent_before(make_world: WorldMaker) -> None:
    routing = RouterConfig(policy="prefix", prefix=PrefixConfig(block_size=16))
    async with make_world(num_decode=2, routing=routing) as world:
        await world.complete(prompt=LONG, max_tokens=1)
        (used,) = [node.name for node in world.decode if node.submitted]
        for body in ({"prompt": LONG}, {"prompt": [*LONG, 6, 7]}):
            told = (await world.http.post("/debug/route", json=body)).json()
            assert told["sent_before"] == {used: 128}
            assert told["decode_node"] == used
        salted = {"prompt": LONG, "cache_salt": "another tenant"}
        told = (await world.http.post("/debug/route", json=salted)).json()
        assert told["sent_before"] == {}
        told = (await world.http.post("/debug/route", json={"prompt": "Something else"})).json()
        assert told["sent_before"] == {}


async def test_a_conversation_has_the_length_that_its_template_gives(
    make_world: WorldMaker,
) -> None:
    async with make_world() as world:
        messages = [{"role": "user", "content": "Hello"}]
        told = (await world.http.post("/debug/route", json={"messages": messages})).json()
        count = (await world.http.post("/tokenize", json={"messages": messages})).json()["count"]
        assert told["prompt_tokens"] == count
        assert told["rule"] == "no_prefill_nodes"


async def test_conditional_disaggregation_is_counted_by_its_rule(make_world: WorldMaker) -> None:
    routing = RouterConfig(conditional=ConditionalConfig(enabled=True, margin=0.0))
    async with make_world(num_prefill=1, routing=routing) as world:
        await world.complete(prompt=LONG, max_tokens=1)
        text = (await world.http.get("/metrics")).text
        name = "pdserve:route_decisions_total"
        assert f'{name}{{planned="disaggregated",rule="prefill_node"}} 1' in text
        assert "pdserve:ttft_seen_over_predicted_count 1" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt_len"),
        ({"prompt_len": "x"}, "prompt_len"),
        ({"prompt_len": "1.5"}, "prompt_len"),
        ({"prompt_len": "[" * 5000}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 512}, "prompt_len"),
        ({"prompt_len": 5, "n": 0}, "n"),
        ({"prompt_len": 5, "n": 17}, "n"),
        ({"prompt_len": 5, "ttft_slo_ms": 0}, "ttft_slo_ms"),
        ({"prompt_len": 5, "tpot_slo_ms": -1}, "tpot_slo_ms"),
        ({"prompt_len": 5, "tpot_slo_ms": "NaN"}, "tpot_slo_ms"),
        ({"prompt_len": 5, "tpot_slo_ms": "5e-324"}, "tpot_slo_ms"),
        ({"prompt_length": 5}, "prompt_length"),
    ],
)
async def test_what_cannot_be_asked_names_the_field(
    make_world: WorldMaker, fields: dict[str, Any], param: str
) -> None:
    async with make_world() as world:
        response = await world.http.get("/debug/route", params=fields)
        assert_refused(response, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "Hi", "prompt_len": 5}, "prompt_len"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "Hi", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "Hi", "model": "other"}, "model"),
    ],
)
async def test_a_prompt_that_cannot_be_routed_names_the_field(
    make_world: WorldMaker, body: dict[str, object], param: str
) -> None:
    async with make_world() as world:
        response = await world.http.post("/debug/route", json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param


async def test_without_nodes_a_dry_run_says_so(make_world: WorldMaker) -> None:
    async with make_world(num_decode=0, await_ready=False) as world:
        response = await world.http.get("/debug/route", params={"prompt_len": 5})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "no_node_error"


@pytest.mark.parametrize("field", ["ttft_slo_ms", "tpot_slo_ms"])
async def test_a_limit_of_a_request_is_checked(make_world: WorldMaker, field: str) -> None:
    async with make_world() as world:
        for limit in (0, 5e-324, 1e-9, 1e300):
            assert_refused(await world.complete(**{field: limit}), field)
        assert (await world.complete(**{field: 0.5})).status_code == 200


async def test_the_log_line_of_a_request_says_why(
    make_world: WorldMaker, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_world(num_prefill=1) as world:
        with caplog.at_level(logging.INFO, logger="router.dispatch"):
            await world.complete(max_tokens=1)
        (line,) = [m for m in caplog.messages if m.startswith("request ")]
        assert "route disaggregated; class short: decode on decode-0" in line


async def test_a_fallback_is_not_told_as_what_was_planned(make_world: WorldMaker) -> None:
    async with make_world(num_prefill=1) as world:
        world.decode[0].behave = fall_back
        timeline = (await world.complete(max_tokens=1, timeline=True)).json()["timeline"]
        assert (timeline["planned"], timeline["route"]) == ("disaggregated", "fallback")
        assert timeline["explain"].startswith("planned disaggregated: class short")
        assert timeline["explain"].endswith("done fallback: prefilled on decode-0")


async def fall_back(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.tell_timeline(request, node.name, fallback=True)
    session.say(request, 0, 0, node.answer_ids[:1], finish=FinishReason.LENGTH)


def assert_refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"prompt": [5] * 1_000_000}, "prompt", "1000000 token ids, at most"),
        ({"prompt": [[5] * 20_000]}, "prompt[0]", "20000 token ids, at most"),
        ({"prompt": [[5], [6]]}, "prompt", "2"),
        ({"prompt": "x" * 5_000_000}, "prompt", "5000000 characters"),
        (
            {"messages": [{"role": "user", "content": "x" * 5_000_000}]},
            "messages[0].content",
            "5000000 characters",
        ),
    ],
)
async def test_what_no_context_holds_is_refused_before_a_look_at_it(
    make_world: WorldMaker, body: dict[str, Any], field: str, words: str
) -> None:
    async with make_world() as world:
        answer = await world.http.post("/debug/route", json=body)
        error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, field)
    assert words in str(error["message"])
