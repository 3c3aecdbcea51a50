"""Generated input over HTTP, gRPC and node sessions: never a fault, and no good request is lost."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import session_pb2
from tests.fuzzing import FACTOR, inputs
from tests.protobufs import messages
from tests.router.conftest import ANSWER, World, WorldMaker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fuzz]

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
PATIENCE_S = 3600.0  # nobody is taken for silent meanwhile
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
REQUESTS: dict[str, type[Message]] = {
    method.name: getattr(pb, method.input_type.name) for method in SERVICE.methods
}
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
CLIENT_FAULTS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # its own
}
DEADLINE_S = 0.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting(make_world: WorldMaker) -> AsyncIterator[World]:
    """Two decode nodes."""
    async with make_world(num_decode=2, silence_s=PATIENCE_S) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(lasting: World) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(lasting.router.grpc_address) as made:
        yield made


async def goes_on(world: World) -> None:
    """A good request is answered rightly."""
    answer = await world.complete(max_tokens=100)
    assert answer.json()["choices"][0]["text"] == ANSWER


@pytest.mark.timeout(120 + 60 * FACTOR)
async def test_schemathesis_finds_nothing(lasting: World, tmp_path: Path) -> None:
    """Its coverage phase alone makes thousands of requests of the document; it runs in full where
    much is asked for.
    """
    phases = "coverage,fuzzing" if FACTOR > 1 else "fuzzing"
    process = await asyncio.create_subprocess_exec(
        *(SCHEMATHESIS, "run", f"http://{lasting.router.http_address}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--phases", phases, "--max-examples", str(5 * FACTOR)),
        *("--continue-on-failure", "--seed", "1", "--request-timeout", "60"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    print(out.decode())
    assert process.returncode == 0, out.decode()
    await goes_on(lasting)
    await lasting.until_idle()


@inputs(60)
@given(data=st.data(), method=st.sampled_from(sorted(REQUESTS)))
async def test_no_message_of_any_method_is_a_fault(
    lasting: World, channel: grpc.aio.Channel, data: st.DataObject, method: str
) -> None:
    words = ("tiny", "user", "assistant", "Hello", "decode-0")
    message = data.draw(messages(REQUESTS[method], words))
    assert await status_of(channel, method, message.SerializeToString()) in CLIENT_FAULTS


@inputs(40)
@given(data=st.binary(max_size=64), method=st.sampled_from(sorted(REQUESTS)))
async def test_no_bytes_to_any_method_are_a_fault(
    lasting: World, channel: grpc.aio.Channel, data: bytes, method: str
) -> None:
    assert await status_of(channel, method, data) in CLIENT_FAULTS


async def test_good_requests_are_answered_after_all_that(lasting: World) -> None:
    await goes_on(lasting)
    await lasting.until_idle()


async def status_of(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends."""
    call: Any = channel.unary_stream(f"/{SERVICE.full_name}/{method}")
    try:
        async for _ in call(data, timeout=DEADLINE_S):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


NODE_MESSAGES = st.lists(
    messages(session_pb2.DecodeMessage, ("decode-1", "decode", "stop", "length", "local")),
    min_size=1,
    max_size=10,
)


@inputs(15)
@given(said=NODE_MESSAGES)
async def test_a_router_outlives_what_a_node_says(
    lasting: World, said: list[session_pb2.DecodeMessage]
) -> None:
    babbling = lasting.decode[1]
    for session in babbling.sessions:
        for message in said:
            session.outbox.put(message)
    await goes_on(lasting)
    assert (await lasting.http.get("/metrics")).status_code == 200
    assert (await lasting.http.get("/admin/status")).status_code == 200
