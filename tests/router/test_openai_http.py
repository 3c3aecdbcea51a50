"""/v1/completions and the small routes over real HTTP, before a fake decode node."""

import asyncio
import socket

import httpx
import pytest

from pdserve.core.config import LimitsConfig
from pdserve.core.request import FinishReason, Request
from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import ANSWER, World, WorldMaker, until
from tests.router.fake_nodes import CACHED_TOKENS, FakeDecodeNode, FakeSession, flood
from tests.router.sse import events_of, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def silence(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    """A node that takes requests and says nothing."""


async def test_a_completion_has_text_usage_and_finish_reason(world: World) -> None:
    answer = (await world.complete(max_tokens=100, temperature=0)).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")
    num_prompt = len(world.decode[0].submitted[0].token_ids)
    num_output = len(world.decode[0].answer_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }


async def test_max_tokens_is_sixteen_where_not_given_and_ends_by_length(world: World) -> None:
    answer = (await world.complete(ignore_eos=True)).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_streamed_completion_joins_to_the_whole_one(world: World) -> None:
    response = await world.complete(max_tokens=100, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert text_of(events) == ANSWER
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in events[-1]


async def test_usage_comes_last_where_asked_for(world: World) -> None:
    response = await world.complete(
        max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    *events, last = events_of(response)
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(world.decode[0].answer_ids)


async def test_prompts_of_a_batch_are_answered_in_their_order(world: World) -> None:
    answer = (await world.complete(prompt=["a", "bb", "ccc"], max_tokens=3, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    sent = world.decode[0].submitted
    assert answer["usage"]["prompt_tokens"] == sum(len(request.token_ids) for request in sent)
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3 * CACHED_TOKENS}


@pytest.mark.parametrize(("fields", "salt"), [({}, b""), ({"cache_salt": "é"}, "é".encode())])
async def test_a_cache_salt_goes_with_each_prompt(
    world: World, fields: dict[str, str], salt: bytes
) -> None:
    await world.complete(prompt=["a", "b"], max_tokens=1, **fields)
    assert [request.cache_salt for request in world.decode[0].submitted] == [salt, salt]


async def test_a_streamed_batch_numbers_its_choices(world: World) -> None:
    events = events_of(await world.complete(prompt=[[5, 6], [7]], max_tokens=100, n=2, stream=True))
    assert [text_of(events, i) for i in range(4)] == [ANSWER] * 4


async def test_token_ids_go_in_and_come_out(world: World) -> None:
    answer = (await world.complete(prompt=[5, 6, 7], max_tokens=100, return_token_ids=True)).json()
    (choice,) = answer["choices"]
    assert world.decode[0].submitted[0].token_ids == (5, 6, 7)
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["token_ids"] == list(world.decode[0].answer_ids)


async def test_streamed_token_ids_join_and_the_prompt_comes_once(world: World) -> None:
    events = events_of(
        await world.complete(prompt=[5, 6], max_tokens=100, return_token_ids=True, stream=True)
    )
    choices = [event["choices"][0] for event in events]
    assert [i for c in choices for i in c["token_ids"]] == list(world.decode[0].answer_ids)
    assert [c["prompt_token_ids"] for c in choices] == [[5, 6]] + [None] * (len(choices) - 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(world: World, stream: bool) -> None:
    response = await world.complete(prompt="The fox", echo=True, max_tokens=100, stream=stream)
    text = text_of(events_of(response)) if stream else response.json()["choices"][0]["text"]
    assert text == "The fox" + ANSWER


async def test_logprobs_have_openais_older_form(world: World, tokenizer: Tokenizer) -> None:
    answer = (await world.complete(max_tokens=3, logprobs=2)).json()
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [tokenizer.token_text(i) for i in world.decode[0].answer_ids[:3]]
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, len(tokens[0]), len(tokens[0] + tokens[1])]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[-0.5, -1.5]] * 3
    assert all(token in top for token, top in zip(tokens, logprobs["top_logprobs"], strict=True))


async def test_a_stop_string_ends_the_answer_and_the_work(world: World) -> None:
    world.decode[0].token_time_s = 0.01
    answer = (await world.complete(max_tokens=400, stop=["brown", "zebra"], logprobs=0)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "The quick "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    await until(lambda: world.decode[0].aborted == [world.decode[0].submitted[0].key])


async def test_a_stop_string_ends_its_choice_alone_also_on_the_node(world: World) -> None:
    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        fox = world.decode[0].answer_ids
        session.say(request, 0, 0, fox[:-1])
        session.say(request, 1, 0, fox[:2])
        await until(lambda: node.ended_choices == [(request.key, 0)])
        assert not node.aborted
        session.say(request, 1, 2, fox[2:-1])

    world.decode[0].behave = behave
    answer = (await world.complete(max_tokens=400, stop="lazy", n=2)).json()
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["lazy", "lazy"]
    await until(lambda: len(world.decode[0].aborted) == 1)


async def test_a_stop_token_is_named_as_the_reason(world: World) -> None:
    third = world.decode[0].answer_ids[2]
    answer = (await world.complete(max_tokens=50, stop_token_ids=[third])).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
    assert answer["usage"]["completion_tokens"] == 3


async def test_sampling_fields_reach_the_node(world: World) -> None:
    await world.complete(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"3": 4},
        seed=11,
        ignore_eos=True,
    )
    sampling = world.decode[0].submitted[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (5, 2, 11)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 0.2)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-0.3, 1.1)
    assert (sampling.logit_bias, sampling.ignore_eos) == (((3, 4.0),), True)


async def test_requests_without_a_seed_get_different_ones(world: World) -> None:
    await world.complete(prompt=["a", "b"], max_tokens=1)
    seeds = {request.sampling.seed for request in world.decode[0].submitted}
    assert len(seeds) == 2


async def test_the_timeline_says_who_did_what(make_world: WorldMaker) -> None:
    async with make_world(num_prefill=1) as world:
        answer = (await world.complete(max_tokens=3, timeline=True)).json()
        timeline = answer["timeline"]
        assert timeline["route"] == "disaggregated"
        assert timeline["stages"][0]["name"] == "admission"
        assert timeline["nodes"] == ["router", "prefill-0", "decode-0"]
        assert (timeline["kv_bytes"], timeline["num_attempts"]) == (1024, 1)
        assert timeline["cached_tokens"] == CACHED_TOKENS
        assert "prefill-0" in timeline["explain"]
        routes = (await world.status())["routes"]
        assert routes == {"disaggregated": 1, "local": 0, "fallback": 0}


async def test_a_streamed_timeline_comes_last(world: World) -> None:
    response = await world.http.post(
        "/v1/completions",
        json={"prompt": "Hi", "max_tokens": 3, "stream": True},
        headers={"X-Pdserve-Timeline": "1"},
    )
    *_, last = events_of(response)
    assert last["choices"] == []
    assert last["timeline"]["route"] == "local"


async def test_timelines_of_a_batch_are_a_list(world: World) -> None:
    answer = (await world.complete(prompt=["a", "b"], max_tokens=2, timeline=True)).json()
    assert [timeline["route"] for timeline in answer["timelines"]] == ["local", "local"]


async def test_the_request_label_is_echoed_and_one_is_made_where_none_came(world: World) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    labelled = await world.http.post("/v1/completions", json=body, headers={"X-Request-Id": "me"})
    assert labelled.headers["x-request-id"] == "me"
    plain = await world.http.get("/health")
    assert len(plain.headers["x-request-id"]) == 32


async def test_two_requests_may_carry_the_same_label(world: World) -> None:
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "Hi", "max_tokens": 40}
    answers = await asyncio.gather(
        *(world.http.post("/v1/completions", json=body, headers=headers) for _ in range(3))
    )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [ANSWER] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_request_with_it(world: World, stream: bool) -> None:
    node = world.decode[0]
    node.behave = silence
    call = asyncio.create_task(world.complete(max_tokens=400, stream=stream))
    request = await node.arrivals.get()
    call.cancel()
    await until(lambda: node.aborted == [request.key])
    await asyncio.gather(call, return_exceptions=True)


async def test_a_client_that_leaves_in_mid_stream_takes_its_request_with_it(world: World) -> None:
    node = world.decode[0]
    node.token_time_s = 0.02
    body = {"prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with world.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
    await until(lambda: node.aborted == [node.submitted[0].key])
    assert (await world.status())["requests"] == 0


async def test_a_client_that_leaves_while_it_sends_is_no_fault(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = world.router.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    assert (await world.complete(max_tokens=1)).status_code == 200
    assert "Exception" not in caplog.text


async def test_a_client_that_reads_nothing_is_dropped(make_world: WorldMaker) -> None:
    async with make_world(limits=LimitsConfig(client_stall_s=0.2), max_model_len=4096) as world:
        node = world.decode[0]
        node.behave = flood
        body = b'{"prompt": "Hi", "max_tokens": 4001, "stream": true, "logprobs": 20, "n": 16}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, _, port = world.router.http_address.rpartition(":")
            client.connect((host, int(port)))
            client.sendall(head % len(body) + body)
            request = await node.arrivals.get()
            await until(lambda: request.key in node.aborted)


async def test_too_many_requests_are_told_when_to_come_again(make_world: WorldMaker) -> None:
    async with make_world(limits=LimitsConfig(max_queued_requests=2)) as world:
        world.decode[0].behave = silence
        calls = [asyncio.create_task(world.complete()) for _ in range(2)]
        for _ in calls:
            await world.decode[0].arrivals.get()
        refused = await world.complete()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "overloaded_error"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        world.decode[0].behave = answer_one
        await until(lambda: len(world.decode[0].aborted) == 2)
        assert (await world.complete()).status_code == 200


async def answer_one(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:1], finish=FinishReason.STOP)


async def test_a_request_that_takes_too_long_is_ended(make_world: WorldMaker) -> None:
    async with make_world(limits=LimitsConfig(request_timeout_s=0.2)) as world:
        world.decode[0].behave = silence
        response = await world.complete()
        assert response.status_code == 504
        error = response.json()["error"]
        assert error["type"] == "request_timeout_error"
        assert "request_timeout_s" in error["message"]
        await until(lambda: len(world.decode[0].aborted) == 1)


async def one_token(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:1])


async def test_a_stream_that_takes_too_long_ends_with_a_named_event(
    make_world: WorldMaker,
) -> None:
    async with make_world(limits=LimitsConfig(request_timeout_s=0.2)) as world:
        world.decode[0].behave = one_token
        response = await world.complete(stream=True)
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert '"request_timeout_error"' in last
        assert "1 tokens had come" in last
        await until(lambda: len(world.decode[0].aborted) == 1)


async def test_models_are_listed_and_found_by_name(world: World) -> None:
    (model,) = (await world.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert (await world.http.get("/v1/models/tiny")).json() == model
    assert (await world.http.get("/v1/models/other")).status_code == 404


async def test_text_and_chats_are_tokenised_and_back(world: World, tokenizer: Tokenizer) -> None:
    answer = (await world.http.post("/tokenize", json={"prompt": "The fox"})).json()
    assert answer["tokens"] == tokenizer.encode("The fox")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    back = await world.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "The fox"}
    messages = [{"role": "user", "content": "Hi"}]
    chat = (await world.http.post("/tokenize", json={"messages": messages})).json()
    text = (await world.http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"


async def test_health_version_and_status_answer(world: World) -> None:
    assert (await world.http.get("/health")).status_code == 200
    assert (await world.http.get("/version")).json()["version"]
    (node,) = (await world.http.get("/admin/status")).json()["nodes"]
    assert (node["name"], node["role"]) == ("decode-0", "decode")
    assert node["ranks"] == [{"rank": 0, "pid": 4711, "host": "127.0.0.1"}]
    assert (node["free_blocks"], node["total_blocks"]) == (1000, 1000)


async def scraped(world: World) -> dict[str, float]:
    response = await world.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rpartition(" ") for line in response.text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


async def test_metrics_count_what_was_served(world: World) -> None:
    before = await scraped(world)
    await world.complete(max_tokens=100)
    after = await scraped(world)
    for name in (
        'pdserve:routes_total{route="local"}',
        'pdserve:request_success_total{finished_reason="stop"}',
        "pdserve:time_to_first_token_seconds_count",
    ):
        assert after[name] == before[name] + 1


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_a_get_of_a_post_route_is_refused_as_such(world: World, route: str) -> None:
    response: httpx.Response = await world.http.get(route)
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"
