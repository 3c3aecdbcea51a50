"""A node that says what its test wants, asked through the openai package, and a call to say."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import World

Say = Callable[[str], None]

ASK = "How is the weather in Paris?"
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@contextmanager
def scripted(world: World, tokenizer: Tokenizer) -> Iterator[Say]:
    """Makes the node answer with a text, in place of its own."""
    node, before = world.decode[0], world.decode[0].answer_ids

    def say(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        node.answer_ids = (*ids, *node.eos_token_ids)

    yield say
    node.answer_ids = before


@asynccontextmanager
async def openai_client(world: World) -> AsyncIterator[AsyncOpenAI]:
    """The package as its users have it, but for proxies and its own retries."""
    async with AsyncOpenAI(
        base_url=f"http://{world.router.http_address}/v1",
        api_key="none",
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client
