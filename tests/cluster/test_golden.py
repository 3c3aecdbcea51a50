"""Float32 answers through prefill, handoff and decode are those of an independent implementation,
whatever moves the KV and however many ranks each side has.
"""

import signal
import subprocess

import pytest

from tests.cluster.golden import SHORT_CASES, ask_all
from tests.cluster.processes import descendants, wait_until_gone
from tests.cluster.served import PDSERVE, START_TIMEOUT_S, served

BLOCK_SIZE = 16  # of both pools, where nothing else is configured

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("transport", "prefill_ranks", "decode_ranks"),
    [("gloo", 1, 1), ("grpc", 3, 1), ("gloo", 1, 3)],
)
def test_tokens_through_a_handoff_equal_the_references(
    transport: str, prefill_ranks: int, decode_ranks: int
) -> None:
    overrides = {
        "kv_transfer.transport": transport,
        "prefill.tensor_parallel_size": prefill_ranks,
        "decode.tensor_parallel_size": decode_ranks,
        "router.local_prefill_below": 0,
    }
    with served(overrides) as cluster:
        for answer in ask_all(cluster, SHORT_CASES):
            assert answer["timeline"]["route"] == "disaggregated"
            assert answer["timeline"]["transport"] == transport
            assert answer["timeline"]["kv_bytes"] > 0
        warm = ask_all(cluster, SHORT_CASES)
        for case, answer in zip(SHORT_CASES, warm, strict=True):
            num_cached = (len(case["prompt_token_ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}
        # Each moves one block, the last one of its prompt.
        assert len({answer["timeline"]["kv_bytes"] for answer in warm}) == 1
        status = cluster.wait_until_idle()
        assert status["routes"] == {
            "disaggregated": 2 * len(SHORT_CASES),
            "local": 0,
            "fallback": 0,
        }
        assert [len(node["ranks"]) for node in status["nodes"]] == [prefill_ranks, decode_ranks]
        below = descendants(cluster.process.pid)
        assert len(below) > 2 + prefill_ranks + decode_ranks
    assert cluster.process.returncode == 0
    assert wait_until_gone(below, timeout_s=5) == {}


def test_nothing_computes_on_when_the_command_itself_is_killed() -> None:
    with served({}) as cluster:
        below = descendants(cluster.process.pid)
        ours = {pid: name for pid, name in below.items() if "Actor" in name}
        assert len(ours) == 2 + 2 + 1, below  # two fronts, two ranks, the router
        cluster.stop(signal.SIGKILL)
        assert wait_until_gone(ours, timeout_s=30) == {}


def test_a_node_that_cannot_start_is_named_and_leaves_nothing() -> None:
    done = subprocess.run(
        [
            *PDSERVE,
            "serve",
            "--set=router.http_port=0",
            "--set=router.grpc_port=0",
            "--set=decode.attention_backend=no-such",
        ],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode != 0
    assert "no-such" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout
