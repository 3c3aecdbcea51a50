"""The tests that every transport passes, where receivers read the senders' blocks: on one GPU, in
one process, whose memory needs no opening.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.kv_transfer.conftest import no_thread_is_left
from tests.kv_transfer.lending import CUDA_IPC, lending_in_process
from tests.kv_transfer.nodes import World, open_world
from tests.kv_transfer.test_cancel import (
    test_a_storm_of_cancels_never_harms_the_handoff_that_comes_next,
)
from tests.kv_transfer.test_conformance import (
    test_a_node_sends_and_receives_at_the_same_time,
    test_kv_arrives_bit_by_bit,
    test_many_handoffs_interleave_and_each_arrives_whole,
    test_prompts_of_any_length_arrive_whole,
    test_the_end_may_be_pushed_after_all_tokens,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

__all__ = [
    "no_thread_is_left",
    "test_a_node_sends_and_receives_at_the_same_time",
    "test_a_storm_of_cancels_never_harms_the_handoff_that_comes_next",
    "test_kv_arrives_bit_by_bit",
    "test_many_handoffs_interleave_and_each_arrives_whole",
    "test_prompts_of_any_length_arrive_whole",
    "test_the_end_may_be_pushed_after_all_tokens",
]


@pytest.fixture
def world() -> Iterator[World]:
    with (
        lending_in_process(),
        open_world(CUDA_IPC, lambda peer_id: torch.device("cuda:0")) as opened,
    ):
        yield opened
