"""A router before fake nodes, with a tokenizer made here."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdserve.core.api_keys import ApiKey
from pdserve.core.config import LimitsConfig, PromptClass, RouterConfig
from pdserve.core.model_spec import read_model_spec
from pdserve.core.security_config import SecurityConfig
from pdserve.text.tokenizer import Tokenizer
from router.server import Router, start_router
from router.service import RouterSpec
from tests.router.fake_nodes import FakeDecodeNode, FakePrefillNode
from tests.text.tiny_models import byte_level, save

ANSWER = "The quick brown fox jumps over the lazy dog."
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WAIT_S = 10.0


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a router reads of a model."""
    backend = byte_level()
    directory = save(
        tmp_path_factory.mktemp("models") / "tiny",
        backend,
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": backend.token_to_id("<|end|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@dataclass
class World:
    """A router, its nodes, and clients of it."""

    router: Router
    decode: list[FakeDecodeNode]
    prefill: list[FakePrefillNode]
    http: httpx.AsyncClient

    async def renewed(self) -> "World":
        """Itself, with nodes that are connected as if they were made anew."""
        for node in self.decode:
            node.forget()
            node.incarnation += 1
        prefill = [node.address for node in self.prefill]
        self.router.set_nodes([*(node.address for node in self.decode), *prefill])
        async with asyncio.timeout(WAIT_S):
            while not all(node["ready"] for node in await self.nodes()):
                await asyncio.sleep(0.01)
        return self

    async def until_idle(self) -> None:
        """Until no request is in work."""
        async with asyncio.timeout(WAIT_S):
            while (await self.status())["requests"] != 0:
                await asyncio.sleep(0.01)

    async def nodes(self) -> list[dict[str, object]]:
        nodes: list[dict[str, object]] = (await self.http.get("/admin/status")).json()["nodes"]
        return nodes

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Hello", **fields})

    async def chat(self, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    async def status(self) -> dict[str, object]:
        status: dict[str, object] = (await self.http.get("/admin/status")).json()
        return status


class WorldMaker:
    """Makes worlds: ``async with make_world(...) as world``."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        self._model_dir = model_dir
        self._tokenizer = tokenizer

    @asynccontextmanager
    async def __call__(
        self,
        *,
        num_decode: int = 1,
        num_prefill: int = 0,
        limits: LimitsConfig | None = None,
        classes: tuple[PromptClass, ...] | None = None,
        local_prefill_below: int = 0,
        routing: RouterConfig | None = None,
        max_model_len: int = 512,
        silence_s: float = WAIT_S,
        await_ready: bool = True,
        admin_token: str | None = None,
        api_keys: tuple[ApiKey, ...] | None = None,
        security: SecurityConfig | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> AsyncIterator[World]:
        eos = self._tokenizer.eos_token_id
        assert eos is not None
        answer_ids = [*self._tokenizer.encode(ANSWER), eos]
        prefill = [FakePrefillNode(f"prefill-{i}") for i in range(num_prefill)]
        decode = [
            FakeDecodeNode(
                f"decode-{i}",
                answer_ids,
                eos_token_ids=[eos],
                prefill_nodes=[node.name for node in prefill],
                max_model_len=max_model_len,
            )
            for i in range(num_decode)
        ]
        nodes: list[FakeDecodeNode | FakePrefillNode] = [*decode, *prefill]
        for node in nodes:
            await node.start()
        spec = RouterSpec(
            config=replace(
                routing or RouterConfig(),
                http_port=0,
                grpc_port=0,
                local_prefill_below=local_prefill_below,
                limits=limits or LimitsConfig(),
                classes=classes or RouterConfig().classes,
            ),
            served_name="tiny",
            model_dir=self._model_dir,
            model=read_model_spec(self._model_dir),
            dtype="float32",
            max_model_len=None,
            headroom_tokens=64,
            admin_token=admin_token,
            api_keys=api_keys,
            security=security or SecurityConfig(),
            prefill_configured=num_prefill > 0,
            nodes=tuple(node.address for node in nodes),
        )
        router = await start_router(spec, silence_s=silence_s)
        try:
            scheme = "https" if spec.security.tls_certificate else "http"
            async with httpx.AsyncClient(
                base_url=f"{scheme}://{router.http_address}",
                timeout=WAIT_S,
                trust_env=False,
                verify=verify,
            ) as http:
                world = World(router, decode, prefill, http)
                if await_ready:
                    await until_ready(http)
                yield world
        finally:
            await router.close(0.0)
            for node in nodes:
                await node.stop()


@pytest.fixture(scope="session")
def make_world(model_dir: Path, tokenizer: Tokenizer) -> WorldMaker:
    return WorldMaker(model_dir, tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_world(make_world: WorldMaker) -> AsyncIterator[World]:
    """One decode node, no prefill nodes; started once for the tests of a file."""
    async with make_world() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pair(make_world: WorldMaker) -> AsyncIterator[World]:
    """Two decode nodes, no prefill nodes; started once for the tests of a file."""
    async with make_world(num_decode=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared_world: World) -> World:
    """The file's shared world as if it were new. Tests that use it run on the module's loop."""
    return await shared_world.renewed()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(shared_pair: World) -> World:
    """Likewise, with two decode nodes."""
    return await shared_pair.renewed()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of a fake or of the router; fail after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)


async def until_reason(world: World, words: str) -> None:
    """Until the router says that it is not ready, or degraded, for this reason."""
    async with asyncio.timeout(WAIT_S):
        while words not in str((await world.http.get("/ready")).json()["reason"]):
            await asyncio.sleep(0.01)


def error_of(response: httpx.Response) -> dict[str, str | None]:
    """OpenAI's error object, which every error is."""
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
