"""A prefill node between a decode session and its ranks, with one thing going wrong at a time."""

import asyncio
from math import inf

import pytest

from kv_transfer.commands import Peer, PeerLost
from pdserve.core.config import PrefillConfig
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2
from prefill_node.node import PrefillNode
from prefill_node.sessions import DecodeSession
from tests.fabric import Fabric, kinds_of, make_layout
from tests.fakes import FakeClock
from tests.nodes.specs import Asked, ask, make_spec
from tests.oracle import FakeModel
from tests.post import HeldPost
from tests.prompts import VOCAB_SIZE


class Bench:
    """A prefill node; its links with decode nodes are never made, so no KV leaves it."""

    def __init__(self, **pool: int) -> None:
        self.model = FakeModel(VOCAB_SIZE)
        self.post = HeldPost()
        config = PrefillConfig(max_num_batched_tokens=pool.get("max_num_batched_tokens", 16))
        layout = make_layout(block_size=4, tp_size=1)
        fabric = Fabric(self.post, self.model)
        self.ranks = fabric.start(
            "p0#1", layout, num_blocks=pool.get("num_blocks", 20), num_slots=config.max_num_seqs
        )
        self.node = PrefillNode(make_spec("p0", config), self.ranks, FakeClock())
        self._layout = layout
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.node.run()),
            loop.create_task(self.node.run_kv_events()),
        ]

    def connect(self, peer_id: str = "decode-0#1") -> DecodeSession:
        peer = Peer(peer_id=peer_id, layout=self._layout, transport="grpc", addresses=("nowhere",))
        return self.node.connect(peer, Outbox())

    async def bring_all_but(self, *held: str) -> None:
        """Deliver all that is on its way to and from the ranks, except queues of these kinds."""
        await asyncio.sleep(0)
        while waiting := [q for q in self.post.waiting if not kinds_of(q) & {*held}]:
            self.post.bring(waiting[0])
            for _ in range(10):
                await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ranks.close()

    def assert_free(self) -> None:
        ledger = self.node.scheduler.ledger
        ledger.pool.check()
        assert ledger.pool.num_free == ledger.pool.num_blocks
        assert ledger.num_draining_blocks == 0
        assert self.node.num_prefills == 0


@pytest.fixture
async def bench():
    bench = Bench()
    yield bench
    await bench.close()


def task_of(asked: Asked, leg: int = 1) -> session_pb2.PrefillTask:
    request = asked.request
    return session_pb2.PrefillTask(
        handoff=session_pb2.HandoffKey(request_id=request.request_id, attempt=0, leg=leg),
        token_ids=request.token_ids,
        prompt_len=request.prompt_len,
        choices=request.choices,
        sampling=convert.sampling_to_proto(request.sampling),
    )


async def said(session: DecodeSession) -> list[session_pb2.PrefillOutputs]:
    """What the session was told so far; it is closed then."""
    session.outbox.close()
    return [message.outputs async for message in session.outbox]


async def test_first_tokens_of_one_step_go_out_in_one_message(bench):
    session = bench.connect()
    asked = [ask(bench.model, i, prompt_len=5, max_tokens=3, num_choices=1 + i) for i in range(3)]
    for each in asked:
        bench.node.prefill(session, task_of(each))
    await bench.bring_all_but("commands")
    (outputs,) = await said(session)
    assert [list(tokens.token_ids) for tokens in outputs.first_tokens] == [
        [each.expected[choice][0] for choice in each.request.choices] for each in asked
    ]


@pytest.mark.parametrize("held", [("steps",), ("outputs",), ("commands",), ()])
async def test_an_abort_frees_a_prompt_in_every_stage(bench, held):
    session = bench.connect()
    asked = ask(bench.model, 1, prompt_len=40, max_tokens=3)
    bench.node.prefill(session, task_of(asked))
    await bench.bring_all_but(*held)
    bench.node.abort(session, convert.handoff_from_proto(task_of(asked).handoff))
    await bench.bring_all_but()
    bench.assert_free()


@pytest.mark.parametrize("end", ["abort", "disconnect"])
async def test_nothing_more_is_computed_of_what_is_not_wanted(bench, end):
    session = bench.connect()
    task = task_of(ask(bench.model, 1, prompt_len=70, max_tokens=3))
    bench.node.prefill(session, task)
    await bench.bring_all_but("steps")
    if end == "abort":
        bench.node.abort(session, convert.handoff_from_proto(task.handoff))
    else:
        bench.node.disconnect(session, "it is over")
    assert bench.node.scheduler.num_queued_tokens == 0
    await bench.bring_all_but("commands")
    assert not any(outputs.first_tokens for outputs in await said(session))


@pytest.mark.parametrize("held", [("steps",), ("outputs",), ("commands",), ()])
async def test_the_end_of_a_session_frees_its_prompts_in_every_stage(bench, held):
    session = bench.connect()
    for i in range(3):
        bench.node.prefill(session, task_of(ask(bench.model, i, prompt_len=30, max_tokens=3)))
    await bench.bring_all_but(*held)
    bench.node.disconnect(session, "it is over")
    await bench.bring_all_but()
    bench.assert_free()


async def test_a_newer_session_of_the_same_decode_node_ends_the_older_one(bench):
    old = bench.connect()
    bench.node.prefill(old, task_of(ask(bench.model, 1, prompt_len=30, max_tokens=3)))
    new = bench.connect()
    bench.node.prefill(new, task_of(ask(bench.model, 2, prompt_len=5, max_tokens=3)))
    bench.node.disconnect(old, "noticed late")
    await bench.bring_all_but("commands")
    assert [len(outputs.first_tokens) for outputs in await said(new)] == [1]
    assert not await said(old)


async def test_a_link_that_can_not_be_made_ends_the_session(bench):
    session = bench.connect()
    bench.node.prefill(session, task_of(ask(bench.model, 1, prompt_len=5, max_tokens=3)))
    bench.ranks.tell(0, PeerLost(peer_id="decode-0#1", reason="nobody listens there"))
    await bench.bring_all_but()
    bench.assert_free()
    assert not [kind for kind in await said(session) if kind.first_tokens]
    bench.node.make_links(session)  # a message that came late
    await bench.bring_all_but()


async def test_a_task_that_is_repeated_counts_once(bench):
    session = bench.connect()
    task = task_of(ask(bench.model, 1, prompt_len=5, max_tokens=3))
    bench.node.prefill(session, task)
    bench.node.prefill(session, task)
    await bench.bring_all_but("commands")
    (outputs,) = await said(session)
    assert len(outputs.first_tokens) == 1


async def test_a_handoff_of_another_decode_node_can_neither_be_taken_nor_aborted(bench):
    session, other = bench.connect(), bench.connect("decode-1#1")
    task = task_of(ask(bench.model, 1, prompt_len=5, max_tokens=3))
    bench.node.prefill(session, task)
    bench.node.prefill(other, task)
    bench.node.abort(other, convert.handoff_from_proto(task.handoff))
    await bench.bring_all_but("commands")
    (refused,) = await said(other)
    assert refused.failures[0].kind == "invalid_request_error"
    (outputs,) = await said(session)
    assert len(outputs.first_tokens) == 1


async def test_a_node_that_is_ending_takes_no_more_prompts(bench):
    session = bench.connect()
    bench.node.readiness.lose("it is closing")
    bench.node.prefill(session, task_of(ask(bench.model, 1, prompt_len=5, max_tokens=3)))
    (outputs,) = await said(session)
    assert outputs.failures[0].kind == "node_lost_error"
    status = bench.node.status([])
    assert (status.ready, status.reason) == (False, "it is closing")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("token_ids", session_pb2.PrefillTask(token_ids=[VOCAB_SIZE])),
        ("choices", session_pb2.PrefillTask(choices=[0])),
        (
            "stop_token_ids",
            session_pb2.PrefillTask(sampling=session_pb2.NodeSampling(stop_token_ids=[1 << 31])),
        ),
        (
            "logit_bias",
            session_pb2.PrefillTask(sampling=session_pb2.NodeSampling(logit_bias_ids=[3])),
        ),
        (
            "temperature",
            session_pb2.PrefillTask(sampling=session_pb2.NodeSampling(temperature=inf)),
        ),
        ("prompt", session_pb2.PrefillTask(token_ids=[1] * 80)),
        ("prompt_len", session_pb2.PrefillTask(prompt_len=90)),
        ("start", session_pb2.PrefillTask(start=2)),
        ("start", session_pb2.PrefillTask(start=8)),
        ("token_mask", session_pb2.PrefillTask(token_mask=b"\xff")),
        ("token_mask", session_pb2.PrefillTask(token_mask=bytes(8))),
        ("token_mask", session_pb2.PrefillTask(token_mask=bytes(7) + b"\xe0")),  # beyond the 61
    ],
)
async def test_a_task_that_no_rank_could_work_with_is_refused_by_field(bench, field, change):
    session = bench.connect()
    wrong = task_of(ask(bench.model, 1, prompt_len=5, max_tokens=3))
    wrong.MergeFrom(change)
    bench.node.prefill(session, wrong)
    await bench.bring_all_but()
    (outputs,) = await said(session)
    (failure,) = outputs.failures
    assert failure.kind in ("invalid_request_error", "never_fits_error")
    assert failure.message.startswith(f"{field}: ")
    bench.assert_free()


async def test_an_empty_task_is_refused(bench):
    session = bench.connect()
    bench.node.prefill(session, session_pb2.PrefillTask())
    (outputs,) = await said(session)
    assert outputs.failures[0].kind == "invalid_request_error"
