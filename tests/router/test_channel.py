"""Sessions with nodes as a router keeps them, over real gRPC."""

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
