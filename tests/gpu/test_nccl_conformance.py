"""The tests that every transport passes, over NCCL: senders' ranks on one GPU, receivers' on
another.
"""

from collections.abc import Iterator

import pytest
import torch

from kv_transfer.transports import TRANSPORTS
from tests.gpu.one_process import NCCL_IN_ONE_PROCESS
from tests.kv_transfer.conftest import no_thread_is_left
from tests.kv_transfer.nodes import World, open_world
from tests.kv_transfer.test_conformance import (
    test_a_node_sends_and_receives_at_the_same_time,
    test_a_small_handoff_overtakes_a_huge_one,
    test_kv_arrives_bit_by_bit,
    test_many_handoffs_interleave_and_each_arrives_whole,
    test_prompts_of_any_length_arrive_whole,
    test_the_end_may_be_pushed_after_all_tokens,
)
from tests.kv_transfer.test_links import (
    test_a_node_made_anew_connects_under_its_new_name,
    test_closing_a_peer_fails_its_handoffs_on_both_sides_and_it_can_come_again,
    test_connecting_again_makes_new_links,
    test_pushes_wait_for_the_links,
)

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(120)]

__all__ = [
    "no_thread_is_left",
    "test_a_node_made_anew_connects_under_its_new_name",
    "test_a_node_sends_and_receives_at_the_same_time",
    "test_a_small_handoff_overtakes_a_huge_one",
    "test_closing_a_peer_fails_its_handoffs_on_both_sides_and_it_can_come_again",
    "test_connecting_again_makes_new_links",
    "test_kv_arrives_bit_by_bit",
    "test_many_handoffs_interleave_and_each_arrives_whole",
    "test_prompts_of_any_length_arrive_whole",
    "test_pushes_wait_for_the_links",
    "test_the_end_may_be_pushed_after_all_tokens",
]


@pytest.fixture
def world() -> Iterator[World]:
    real = TRANSPORTS["nccl"]
    TRANSPORTS["nccl"] = NCCL_IN_ONE_PROCESS
    try:
        with open_world("nccl", _device_of) as opened:
            yield opened
    finally:
        TRANSPORTS["nccl"] = real


def _device_of(peer_id: str) -> torch.device:
    return torch.device("cuda", 0 if peer_id.startswith("p") else 1)
