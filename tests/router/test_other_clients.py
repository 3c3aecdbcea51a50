"""Clients of OpenAI's API that people use, unchanged, against a router before a fake node.

`pip install langchain-openai litellm` installs them; without them these tests are skipped by name.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.router.conftest import ANSWER, World

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # other people's
]

Result = TypeVar("Result")
HELLO = [{"role": "user", "content": "Hello"}]


async def in_thread(work: Callable[[], Result]) -> Result:
    """What a program without an event loop does; the router runs on this loop meanwhile."""
    return await asyncio.to_thread(work)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def langchain(world: World) -> Callable[..., Any]:
    """Makes LangChain's chat models."""
    langchain_openai: Any = pytest.importorskip("langchain_openai")

    def make(**options: object) -> Any:
        url = f"http://{world.router.http_address}/v1"
        return langchain_openai.ChatOpenAI(base_url=url, api_key="none", model="tiny", **options)

    return make


async def test_langchain_chats(langchain: Callable[..., Any]) -> None:
    model = langchain(temperature=0, max_tokens=100)
    answer = await in_thread(lambda: model.bind(logprobs=True, top_logprobs=2).invoke("Hello"))
    assert answer.content == ANSWER
    assert answer.response_metadata["logprobs"]["content"]
    assert answer.usage_metadata["output_tokens"] > 0


async def test_langchain_streams(langchain: Callable[..., Any]) -> None:
    model = langchain(stream_usage=True)  # LangChain's own default asks OpenAI's host only
    chunks = await in_thread(lambda: list(model.stream("Hello")))
    assert "".join(chunk.content for chunk in chunks) == ANSWER
    assert any(chunk.usage_metadata for chunk in chunks)


async def test_langchain_takes_the_newer_route(langchain: Callable[..., Any]) -> None:
    model = langchain(use_responses_api=True)
    answer = await in_thread(lambda: model.invoke("Hello"))
    assert answer.text == ANSWER
    chunks = await in_thread(lambda: list(model.stream("Hello")))
    assert "".join(chunk.text for chunk in chunks) == ANSWER


@pytest.fixture
def litellm(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function of LiteLLM's."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # asks nobody for prices
    module: Any = pytest.importorskip("litellm")
    url = f"http://{world.router.http_address}/v1"
    return lambda name, **fields: getattr(module, name)(api_base=url, api_key="none", **fields)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_litellm_chats(litellm: Callable[..., Any], provider: str) -> None:
    fields = {"model": f"{provider}/tiny", "messages": HELLO, "temperature": 0, "user": "me"}
    answer = await in_thread(lambda: litellm("completion", **fields))
    assert answer.choices[0].message.content == ANSWER
    streamed = await in_thread(lambda: list(litellm("completion", stream=True, **fields)))
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == ANSWER


async def test_litellm_completes_and_responds(litellm: Callable[..., Any]) -> None:
    answer = await in_thread(
        lambda: litellm(
            "text_completion",
            model="text-completion-openai/tiny",
            prompt="Hello",
            max_tokens=100,
        )
    )
    assert answer.choices[0].text == ANSWER
    answer = await in_thread(lambda: litellm("responses", model="openai/tiny", input="Hello"))
    assert answer.output[0].content[0].text == ANSWER


@pytest.mark.parametrize(
    ("change", "error"),
    [({"model": "openai/other"}, "NotFoundError"), ({"top_p": 2}, "BadRequestError")],
)
async def test_litellm_raises_what_its_users_catch(
    litellm: Callable[..., Any], change: dict[str, object], error: str
) -> None:
    expected: type[Exception] = getattr(pytest.importorskip("litellm"), error)
    fields = {"model": "openai/tiny", "messages": HELLO, **change}
    with pytest.raises(expected):
        await in_thread(lambda: litellm("completion", **fields))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hello", "repetition_penalty": 1.0, "max_tokens": 3}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
                "max_completion_tokens": 3,
            },
        ),
    ],
)
async def test_what_vllms_bench_serve_sends_is_served(
    world: World, path: str, fields: dict[str, object]
) -> None:
    """Its requests as they are; it takes the number of tokens from the usage at the end."""
    body = {
        "model": "tiny",
        "logprobs": None,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    answer = await world.http.post(path, json=body, headers={"x-request-id": "bench-0"})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    *tokens, last = map(json.loads, events)
    assert all(event["choices"] for event in tokens)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
