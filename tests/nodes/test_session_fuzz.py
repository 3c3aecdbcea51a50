"""Whatever comes over a session, a node goes on: nothing is lost, leaked or left running."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from tests.fuzzing import inputs
from tests.nodes.site import HELLO, PATIENCE_S, RouterClient, Site
from tests.nodes.specs import ask
from tests.protobufs import messages

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fuzz]

WORDS = ("router-0", "decode-0", "p0", "stop", "length", "prefill", "decode")
ROUTER_MESSAGES = st.lists(messages(session_pb2.RouterMessage, WORDS), min_size=1, max_size=10)
PREFILL_REQUESTS = st.lists(messages(session_pb2.PrefillRequest, WORDS), min_size=1, max_size=10)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site() as made:
        await made.start_all("p0")
        yield made


@pytest.fixture
def router(site: Site) -> RouterClient:
    return site._routers[0]


async def said(call: Any, *said: object) -> None:
    """Say all of it; the other side may end the session before."""
    try:
        for message in said:
            await call.write(message)
        await call.done_writing()
        async with asyncio.timeout(PATIENCE_S):
            async for _ in call:
                pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass


async def goes_on(site: Site, router: RouterClient) -> None:
    """A good request, prefilled on the prefill node, is answered rightly; then all is free."""
    good = ask(site.model, 2, prompt_len=20, max_tokens=4, prefill_nodes=("p0",))
    router.submit(good)
    await router.until_over(good)
    assert good.got == good.expected
    await site.until_free()


@inputs(8)
@given(messages_=ROUTER_MESSAGES)
async def test_a_decode_node_outlives_what_a_router_says(
    site: Site, router: RouterClient, messages_: list[session_pb2.RouterMessage]
) -> None:
    async with grpc.aio.insecure_channel(site.decode.address.address) as channel:
        call = session_pb2_grpc.DecodeNodeStub(channel).Session()
        await said(call, session_pb2.RouterMessage(hello=HELLO), *messages_)
    await goes_on(site, router)


@inputs(8)
@given(messages_=PREFILL_REQUESTS, fits=st.booleans())
async def test_a_prefill_node_outlives_what_a_decode_node_says(
    site: Site, router: RouterClient, messages_: list[session_pb2.PrefillRequest], fits: bool
) -> None:
    record = site.record("decode-0")
    record.incarnation = "another"
    hello = [session_pb2.PrefillRequest(hello=record)] if fits else []
    async with grpc.aio.insecure_channel(site.nodes["p0"].address.address) as channel:
        call = session_pb2_grpc.PrefillNodeStub(channel).Session()
        await said(call, *hello, *messages_)
    await goes_on(site, router)
