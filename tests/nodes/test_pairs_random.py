"""Decode and prefill nodes under everything at once: requests, losses, failures, aborts."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import HandoffId
from tests.fabric_endpoint import Endpoint
from tests.nodes.specs import MODEL, Asked, ask
from tests.nodes.world import Pool, World
from tests.prompts import VOCAB_SIZE

FAILURES = ("checksum_error", "transfer_timeout_error", "transfer_error")


class PairMachine(RuleBasedStateMachine):
    """Operations in any order; at the end everything that was asked for must have come."""

    world: World
    is_stormy: bool  # whether nodes and links are lost

    @initialize(
        is_stormy=st.booleans(),
        depth=st.integers(1, 2),
        block_sizes=st.sampled_from([(4, 4), (4, 6), (1, 4), (2, 8), (8, 4), (3, 2)]),
        tp_sizes=st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 2)]),
        decode_tokens=st.integers(24, 96),
        prefill_tokens=st.integers(24, 96),
        max_num_seqs=st.integers(2, 6),
        max_num_batched_tokens=st.integers(2, 24),
        local_prefill_tokens=st.integers(0, 8),
        headroom_tokens=st.integers(0, 9),
        chunk=st.integers(1, 16),
    )
    def start(self, is_stormy, **drawn):
        self.is_stormy = is_stormy
        decode_block, prefill_block = drawn["block_sizes"]
        prefill_tp, decode_tp = drawn["tp_sizes"]
        decode = DecodeConfig(
            max_num_seqs=drawn["max_num_seqs"],
            max_num_batched_tokens=drawn["max_num_batched_tokens"],
            local_prefill_tokens=drawn["local_prefill_tokens"],
            fallback_chunk=8,
            headroom_tokens=drawn["headroom_tokens"],
            overtake_s=1.0,
            tensor_parallel_size=decode_tp,
        )
        prefill = PrefillConfig(
            max_num_batched_tokens=drawn["chunk"],
            max_num_seqs=3,
            tensor_parallel_size=prefill_tp,
            overtake_s=1.0,
        )
        prefill_pool = Pool(
            config=prefill,
            num_blocks=drawn["prefill_tokens"] // prefill_block,
            block_size=prefill_block,
        )
        self.world = World(
            Pool(
                config=decode,
                num_blocks=drawn["decode_tokens"] // decode_block,
                block_size=decode_block,
            ),
            {"p0": prefill_pool, "p1": prefill_pool},
            depth=drawn["depth"],
        )
        self.world.connect_all()

    # ---- requests ---------------------------------------------------------------------------

    @rule(
        prompt_len=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        prefill_nodes=st.sampled_from(
            [(), ("p0",), ("p0", "p1"), ("p1", "p0"), ("gone",), ("gone", "p1")]
        ),
        local_allowed=st.booleans(),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        num_had=st.sampled_from([0, 0, 0, 1, 4]),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.sampled_from([(), (), tuple(range(0, VOCAB_SIZE, 7))]),
        penalty=st.sampled_from([0.0, 0.5]),
        num_alike=st.sampled_from([0, 5, 12, 30]),
        goes_on=st.sampled_from([False, False, True]),
        cache_salt=st.sampled_from([b"", b"", b"", b"other"]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        router=st.integers(0, 1),
    )
    def submit(self, prompt_len, num_choices, router, goes_on, **others):
        node = self.world.decode.decode
        max_model_len = min(node.max_model_len, MODEL.max_position)
        asked = ask(
            self.world.model,
            len(self.world.asked),
            prompt_len=min(prompt_len, max_model_len - 1),
            num_choices=min(num_choices, node.max_choices),
            max_model_len=max_model_len,
            after=self.world.asked[-1].tokens if goes_on and self.world.asked else (),
            **others,
        )
        self.world.submit(asked, router)

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data(), is_router_lost=st.sampled_from([False, False, False, True]))
    def give_up(self, data, is_router_lost):
        if is_router_lost:
            self.world.lose_router(data.draw(st.integers(0, 1)))
        else:
            self.world.abort(data.draw(st.sampled_from(self._unfinished())))

    @precondition(lambda self: self._begun_choices())
    @rule(data=st.data())
    def end_choice(self, data):
        asked, choice = data.draw(st.sampled_from(self._begun_choices()))
        self.world.end_choice(asked, choice)

    # ---- time -------------------------------------------------------------------------------

    @rule(queue=st.integers(0, 20))
    def bring(self, queue):
        self.world.bring(queue)

    @rule(count=st.integers(2, 60), seed=st.integers(0, 1 << 16))
    def bring_some(self, count, seed):
        self.world.bring_some(count, seed)

    @rule(duration_s=st.floats(0, 2))
    def advance(self, duration_s):
        self.world.clock.advance(duration_s)

    # ---- what goes wrong --------------------------------------------------------------------

    @rule(name=st.sampled_from(["p0", "p1"]))
    def connect(self, name):
        self.world.connect(name)

    @precondition(lambda self: self.is_stormy)
    @rule(name=st.sampled_from(["p0", "p1"]), what=st.sampled_from(["wire", "KV", "node"]))
    def lose(self, name, what):
        match what:
            case "wire":
                self.world.cut_wire(name)
            case "KV":
                self.world.cut_kv(name)
            case "node":
                self.world.kill_prefill(name)

    @precondition(lambda self: self._sending())
    @rule(data=st.data(), kind=st.sampled_from(FAILURES))
    def fail_send(self, data, kind):
        endpoint, handoff = data.draw(st.sampled_from(self._sending()))
        endpoint.fail_send(handoff, kind)
        self.world.settle()

    @precondition(lambda self: self._receiving())
    @rule(data=st.data(), kind=st.sampled_from(FAILURES))
    def fail_receive(self, data, kind):
        endpoint, handoff = data.draw(st.sampled_from(self._receiving()))
        endpoint.fail_receive(handoff, kind)
        self.world.settle()

    # ---- ends -------------------------------------------------------------------------------

    def teardown(self):
        if hasattr(self, "world"):
            try:
                self.world.finish()
            finally:
                self.world.close()

    # ---- private ----------------------------------------------------------------------------

    def _unfinished(self) -> list[Asked]:
        return [asked for asked in self.world.asked if not asked.is_over]

    def _begun_choices(self) -> list[tuple[Asked, int]]:
        """Choices of several that have got something in this attempt, and go on."""
        return [
            (asked, choice)
            for asked in self._unfinished()
            for choice, got in asked.got.items()
            if len(asked.got) > 1 and choice not in asked.ended
            if asked.request.prompt_len + len(got) > len(asked.request.token_ids)
        ]

    def _sending(self) -> list[tuple[Endpoint, HandoffId]]:
        members = self.world.prefills.values()
        endpoints = [endpoint for member in members for endpoint in member.ranks.endpoints]
        return [(endpoint, handoff) for endpoint in endpoints for handoff in endpoint.sending]

    def _receiving(self) -> list[tuple[Endpoint, HandoffId]]:
        endpoints = self.world.decode.ranks.endpoints
        return [(endpoint, handoff) for endpoint in endpoints for handoff in endpoint.receiving]


QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


def test_whatever_happens_every_request_ends_rightly_and_every_block_comes_back():
    run_state_machine_as_test(PairMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_happens_for_long_every_request_ends_rightly():
    run_state_machine_as_test(
        PairMachine, settings=settings(QUICK, max_examples=1500, stateful_step_count=80)
    )
