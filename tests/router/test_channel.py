"""Sessions with nodes as a router keeps them, over real gRPC."""

from dataclasses import replace

import pytest

from pdserve.rpc.v1 import session_pb2
from router.channel import Channels
from tests.router.conftest import until
from tests.router.fake_nodes import FakeDecodeNode, FakePrefillNode


async def test_nodes_that_are_ready_are_no_pair_before_they_are_connected() -> None:
    decode, prefill = FakeDecodeNode("decode-0", [1]), FakePrefillNode("prefill-0")
    channels = Channels(router_id="router-0", model_fingerprint="f")
    try:
        for node in (decode, prefill):
            await node.start()
        channels.set_nodes([decode.address, prefill.address])
        await until(lambda: all(view.ready for view in channels.views()))
        assert not channels.had_pair()
        decode.prefill_nodes = ("prefill-0",)
        decode.tell_state()
        await until(channels.had_pair)
        channels.set_nodes([])
        assert channels.had_pair(), "there was one"
    finally:
        await channels.close()
        for node in (decode, prefill):
            await node.stop()


NONSENSE = {
    "an end that no answer has": session_pb2.DecodeMessage(
        outputs=session_pb2.StepOutputs(
            outputs=[session_pb2.TokenOutput(request_id="r", finish_reason="bored")]
        )
    ),
    "trouble in a stage that no request has": session_pb2.DecodeMessage(
        status=session_pb2.NodeStatus(
            node="decode-0", troubles=[session_pb2.Trouble(node="p", state="nowhere")]
        )
    ),
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE.keys())
async def test_a_node_that_talks_nonsense_is_left_and_tried_again(
    message: session_pb2.DecodeMessage,
) -> None:
    decode = FakeDecodeNode("decode-0", [1])
    channels = Channels(router_id="router-0", model_fingerprint="f")
    try:
        await decode.start()
        channels.set_nodes([decode.address])
        await until(lambda: channels.view("decode-0").ready)
        decode.sessions[-1].outbox.put(message)
        await until(lambda: not channels.view("decode-0").ready)
        assert "makes no sense" in str(channels.view("decode-0").problem)
        await until(lambda: channels.view("decode-0").session is not None)
    finally:
        await channels.close()
        await decode.stop()


async def test_another_start_of_a_node_is_not_taken_for_the_one_that_was_named() -> None:
    decode = FakeDecodeNode("decode-0", [1])
    channels = Channels(router_id="router-0", model_fingerprint="f")
    try:
        await decode.start()
        channels.set_nodes([replace(decode.address, incarnation="0")])
        await until(lambda: "of another start" in (channels.view("decode-0").problem or ""))
        assert not channels.view("decode-0").ready
    finally:
        await channels.close()
        await decode.stop()
