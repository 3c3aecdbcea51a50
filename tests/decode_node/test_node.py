"""A decode node in each stage of a request, with one thing going wrong at a time."""

from typing import Any

import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import HandoffId, RouteTaken
from pdserve.rpc.v1 import session_pb2
from tests.nodes.specs import Asked, ask
from tests.nodes.world import Pool, World


@pytest.fixture
def start():
    """Starts a decode node that is connected to two prefill nodes."""
    worlds = []

    def start(
        *,
        decode_blocks: int = 40,
        prefill_blocks: int = 40,
        headroom_tokens: int = 4,
    ) -> World:
        decode = DecodeConfig(
            max_num_batched_tokens=32,
            max_num_seqs=8,
            headroom_tokens=headroom_tokens,
            local_prefill_tokens=8,
            fallback_chunk=8,
        )
        prefill = PrefillConfig(max_num_batched_tokens=8)
        world = World(
            Pool(config=decode, num_blocks=decode_blocks),
            {
                "p0": Pool(config=prefill, num_blocks=prefill_blocks),
                "p1": Pool(config=prefill, num_blocks=40),
            },
        )
        worlds.append(world)
        world.connect_all()
        return world

    yield start
    for world in worlds:
        world.close()


@pytest.fixture
def world(start):
    return start()


def remote(world: World, number: int = 1, **options):
    """A request whose prompt is longer than a chunk of the prefill node."""
    fields = {"prompt_len": 21, "max_tokens": 9, "prefill_nodes": ("p0", "p1"), **options}
    return ask(world.model, number, **fields)


# How far a request to p0 gets when these are held back.
STAGES = {
    "asked": ("up",),
    "queued there": ("p0 steps",),
    "computed, nothing sent": ("over", "down"),
    "first tokens known, KV on its way": ("over",),
    "KV in, first tokens on their way": ("down",),
    "decoding": ("decode-0 steps",),
}


@pytest.mark.parametrize("held", STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("num_choices", [1, 3])
def test_an_abort_gives_everything_back_in_every_stage(world, held, num_choices):
    asked = remote(world, num_choices=num_choices)
    world.submit(asked)
    world.bring_all_but(*held)
    world.abort(asked)
    world.finish()


@pytest.mark.parametrize("held", [("decode-0 steps",), ("decode-0 outputs",)])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_an_abort_gives_everything_back_while_the_prompt_is_prefilled_here(
    world, held, num_choices
):
    asked = remote(world, prefill_nodes=(), num_choices=num_choices)
    world.submit(asked)
    world.bring_all_but(*held)
    world.abort(asked)
    world.finish()


@pytest.mark.parametrize("held", ["over", "decode-0 steps"])
@pytest.mark.parametrize("num_ended", [1, 2, 3])
def test_choices_that_nobody_wants_end_one_by_one(world, held, num_ended):
    """A client's stop string ends one; the others go on."""
    asked = remote(world, num_choices=3)
    world.submit(asked)
    world.bring_all_but(held)
    for choice in range(num_ended):
        world.end_choice(asked, choice)
    world.finish()
    for choice, got in asked.got.items():
        assert got == asked.expected[choice][: 1 if choice < num_ended else None]


def test_a_choice_that_has_not_parted_from_the_others_is_not_ended_alone(world):
    asked = remote(world, num_choices=2)
    world.submit(asked)
    world.decode.decode.end_choice(world.routers[0].session, asked.request.key, 1)
    world.finish()
    assert asked.got == asked.expected


def test_another_router_ends_no_choice(world):
    asked = remote(world, num_choices=2)
    world.submit(asked)
    world.bring_all_but("decode-0 steps")
    world.decode.decode.end_choice(world.routers[1].session, asked.request.key, 1)
    world.finish()
    assert asked.got == asked.expected


@pytest.mark.parametrize("held", STAGES.values(), ids=STAGES.keys())
def test_when_a_router_is_gone_its_requests_end_in_every_stage(world, held):
    world.submit(remote(world))
    world.bring_all_but(*held)
    world.lose_router(0)
    world.finish()


BEFORE_DECODING = {stage: held for stage, held in STAGES.items() if stage != "decoding"}


@pytest.mark.parametrize("held", BEFORE_DECODING.values(), ids=BEFORE_DECODING.keys())
@pytest.mark.parametrize("how", ["wire", "KV", "node"])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_when_a_prefill_node_is_lost_the_next_of_the_route_does_it(world, held, how, num_choices):
    asked = remote(world, num_choices=num_choices)
    world.submit(asked)
    world.bring_all_but(*held)
    {"wire": world.cut_wire, "KV": world.cut_kv, "node": world.kill_prefill}[how]("p0")
    world.finish()
    assert asked.got == asked.expected
    assert "p1" in {stage.node for stage in asked.timelines[-1].stages}


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("held", [("over", "down"), ("over",)], ids=["no tokens yet", "tokens"])
def test_when_a_handoff_fails_the_next_of_the_route_does_it(world, side, held):
    asked = remote(world)
    world.submit(asked)
    world.bring_all_but(*held)
    if side == "sender":
        (endpoint,) = world.prefills["p0"].ranks.endpoints
        endpoint.fail_send(endpoint.sending[0])
    else:
        (endpoint,) = world.decode.ranks.endpoints
        endpoint.fail_receive(endpoint.receiving[0])
    world.finish()
    assert asked.got == asked.expected
    assert asked.timelines[-1].stages[-3].node in ("p1", "decode-0")
    assert "p1" in {stage.node for stage in asked.timelines[-1].stages}


@pytest.mark.parametrize("num_choices", [1, 3])
def test_what_a_prefill_node_has_brought_whole_before_it_went_is_used(world, num_choices):
    """The ranks have the KV and are about to say so when the session ends."""
    asked = remote(world, num_choices=num_choices)
    world.submit(asked)
    world.bring_all_but("decode-0 events")
    assert all(asked.got.values())
    world.cut_wire("p0")
    world.finish()
    assert {stage.node for stage in asked.timelines[-1].stages} == {"decode-0", "p0"}
    assert asked.timelines[-1].kv_bytes > 0


def test_the_late_end_of_a_dead_node_does_not_touch_its_successor(world):
    world.kill_prefill("p0")
    world.connect("p0")
    world.bring_all_but("cut down", "noticed")
    assert world.decode.decode.legs.connected == ["p0", "p1"]
    world.bring_all_but()
    assert world.decode.decode.legs.connected == ["p0", "p1"]


def test_what_no_prefill_node_can_do_is_done_here(world):
    asked = remote(world, prefill_nodes=("gone", "p0"))
    world.submit(asked)
    world.bring_all_but("over")
    world.cut_kv("p0")
    world.finish()
    assert asked.timelines[-1].route is RouteTaken.FALLBACK
    stages = [(stage.name, stage.node) for stage in asked.timelines[-1].stages]
    assert stages == [
        ("reserve", "decode-0"),
        ("prefill_queue", "p0"),
        ("prefill", "p0"),
        ("prefill", "decode-0"),
        ("decode_queue", "decode-0"),
        ("first_decode", "decode-0"),
    ]


def test_at_the_end_of_its_route_a_request_fails_with_the_last_reason(world):
    asked = remote(world, prefill_nodes=("p0", "gone"), local_allowed=False)
    world.submit(asked)
    world.bring_all_but("over", "down")
    (endpoint,) = world.decode.ranks.endpoints
    endpoint.fail_receive(endpoint.receiving[0])
    world.finish()
    assert asked.failure == "prefill_failed_error"
    assert "fails while received" in asked.failure_message
    assert asked.retryable


def test_a_prompt_that_one_prefill_node_can_not_hold_goes_to_the_next(start):
    world = start(prefill_blocks=3)
    asked = remote(world)
    world.submit(asked)
    world.finish()
    assert asked.got == asked.expected
    assert asked.timelines[-1].route is RouteTaken.DISAGGREGATED
    assert asked.timelines[-1].stages[1].node == "p1"


def test_a_request_that_waits_for_blocks_starts_when_they_come_back(start):
    world = start(decode_blocks=8)
    first = remote(world, 1, prompt_len=20, max_tokens=8, prefill_nodes=())
    second = remote(world, 2, prompt_len=20, max_tokens=8, prefill_nodes=())
    world.submit(first)
    world.submit(second)
    world.finish()
    assert second.got == second.expected


def test_a_withdrawn_handoff_is_cancelled_there_and_asked_for_again(start):
    world = start(decode_blocks=12, headroom_tokens=0)
    old = remote(world, 1, prompt_len=8, max_tokens=40, prefill_nodes=())
    world.submit(old)
    world.bring_all_but("steps", "outputs")
    young = remote(world, 2, prompt_len=20, max_tokens=4)
    world.submit(young)
    world.bring_all_but("up")
    legs = world.decode.decode.legs
    assert legs.get(HandoffId("r2", 0, 1)) is None
    assert legs.get(HandoffId("r2", 0, 2)) is not None
    world.finish()
    assert young.got == young.expected
    assert old.timelines[-1].num_preemptions == young.timelines[-1].num_preemptions == 0
    assert legs.kv_bytes_moved == 20 * world.decode.ranks.layout.token_bytes


def test_a_preempted_request_tells_so_and_keeps_the_route_of_its_prompt(start):
    world = start(decode_blocks=14)
    old = remote(world, 1, prompt_len=8, max_tokens=40, prefill_nodes=())
    young = remote(world, 2, prompt_len=8, max_tokens=40)
    world.submit(old)
    world.submit(young)
    world.finish()
    assert young.timelines[-1].num_preemptions > 0
    assert young.timelines[-1].route is RouteTaken.DISAGGREGATED
    assert world.decode.node.status([]).num_preemptions > 0


def test_the_stages_of_a_request_add_up_to_the_time_until_its_first_decode(world):
    asked = remote(world, num_choices=2)
    began_s = world.clock.now_s()
    world.submit(asked)
    while not any(len(got) > 1 for got in asked.got.values()):
        world.bring(0)
    elapsed_s = world.clock.now_s() - began_s
    world.finish()
    total_s = sum(stage.duration_s for stage in asked.timelines[-1].stages)
    messages_s = 0.03  # the request and the first tokens on their way are nobody's stage
    assert elapsed_s - messages_s <= total_s <= elapsed_s


# ---- prefill nodes that say strange things ------------------------------------------------------


def answer(asked: Asked, **fields: Any) -> session_pb2.FirstTokens:
    """First tokens for the request's first leg, as they should not be."""
    key = session_pb2.HandoffKey(request_id=asked.request.request_id, attempt=0, leg=1)
    return session_pb2.FirstTokens(handoff=key, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": []},
        {"token_ids": [1, 2]},
        {"token_ids": [1]},
        {"token_ids": [1], "logprobs": [session_pb2.TokenLogprobs()] * 2},
        {"token_ids": [1], "logprobs": [session_pb2.TokenLogprobs(top_ids=[1])]},
    ],
)
def test_first_tokens_that_make_no_sense_are_a_failure_of_that_node(world, fields):
    asked = remote(world, logprobs=2)
    world.submit(asked)
    world.bring_all_but("up")
    outputs = session_pb2.PrefillOutputs(first_tokens=[answer(asked, **fields)])
    world.decode.decode.on_prefill_outputs(world.wires["p0"].link, outputs)
    world.finish()
    assert asked.got == asked.expected
    assert asked.timelines[-1].stages[1].node == "p1"


def test_first_tokens_come_once_and_from_the_node_that_was_asked(world):
    asked = remote(world)
    world.submit(asked)
    world.bring_all_but("over")
    false = session_pb2.PrefillOutputs(first_tokens=[answer(asked, token_ids=[1])])
    false.failures.add(handoff=false.first_tokens[0].handoff, kind="transfer_error")
    world.decode.decode.on_prefill_outputs(world.wires["p1"].link, false)
    del false.failures[:]
    world.decode.decode.on_prefill_outputs(world.wires["p0"].link, false)
    world.finish()
    assert asked.got == asked.expected
    assert asked.timelines[-1].stages[1].node == "p0"


@pytest.mark.parametrize("num_choices", [1, 2])
def test_first_tokens_and_the_failure_of_their_handoff_may_come_together(world, num_choices):
    asked = remote(world, num_choices=num_choices)
    world.submit(asked)
    world.bring_all_but("down", "over")
    tokens = [asked.expected[choice][0] for choice in range(num_choices)]
    outputs = session_pb2.PrefillOutputs(first_tokens=[answer(asked, token_ids=tokens)])
    outputs.failures.add(
        handoff=outputs.first_tokens[0].handoff, kind="transfer_error", message="both at once"
    )
    world.decode.decode.on_prefill_outputs(world.wires["p0"].link, outputs)
    world.finish()
    assert asked.got == asked.expected


def test_an_abort_after_first_tokens_and_failure_came_together_leaves_nothing(world):
    asked = remote(world, num_choices=2)
    world.submit(asked)
    world.bring_all_but("down", "over")
    tokens = [asked.expected[choice][0] for choice in range(2)]
    outputs = session_pb2.PrefillOutputs(first_tokens=[answer(asked, token_ids=tokens)])
    outputs.failures.add(handoff=outputs.first_tokens[0].handoff, kind="transfer_error")
    world.decode.decode.on_prefill_outputs(world.wires["p0"].link, outputs)
    world.abort(asked)
    world.finish()


def test_a_name_that_was_used_before_is_another_handoff(world):
    first = remote(world)
    world.submit(first)
    world.bring_all_but("over", "decode-0 events")
    world.abort(first)
    again = remote(world)
    world.asked.remove(first)
    world.submit(again)
    world.finish()
    assert again.got == again.expected


def test_a_prefill_node_whose_link_keeps_failing_is_left_alone_and_tried_again(world):
    node = world.decode.decode
    for number in range(1, 4):
        asked = remote(world, number)
        world.submit(asked)
        world.bring_all_but("over", "down")
        (endpoint,) = world.decode.ranks.endpoints
        endpoint.fail_receive(endpoint.receiving[0])
        world.finish()
        assert asked.got == asked.expected
    status = node.status([])
    assert list(status.connected_prefill_nodes) == ["p1"]
    (trouble,) = status.troubles
    assert (trouble.node, trouble.stage, trouble.state) == ("p0", "link", "open")
    assert nodes_of(world, 4) == {"decode-0", "p1"}
    world.clock.advance(2.0)
    assert nodes_of(world, 5) == {"decode-0", "p0"}
    assert not node.status([]).troubles


def nodes_of(world: World, number: int) -> set[str]:
    """The nodes that answered a request whose route prefers p0."""
    asked = remote(world, number)
    world.submit(asked)
    world.finish()
    assert asked.got == asked.expected
    return {stage.node for stage in asked.timelines[-1].stages}
