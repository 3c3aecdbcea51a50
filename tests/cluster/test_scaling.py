"""`pdserve scale` and `pdserve drain` on a cluster that serves."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.processes import descendants
from tests.cluster.served import PDSERVE, START_TIMEOUT_S, Served, served
from tests.faults.tiny_model import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

NAME = "test-scaling"
BODY = {"prompt": list(range(40, 100)), "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    overrides = {
        "model.source": make_tiny_model(tmp_path_factory.mktemp("model")),
        "model.load_format": "dummy",
        "prefill.kv_cache_bytes": 16 << 20,
        "decode.kv_cache_bytes": 16 << 20,
    }
    with served(overrides, "--name", NAME) as cluster:
        yield cluster


def order(*words: str) -> str:
    """What a command answers, within the time that it may take."""
    done = subprocess.run(
        [*PDSERVE, *words, "--name", NAME, "--json"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["message"])


def ask(cluster: Served, max_tokens: int) -> dict[str, Any]:
    body = {**BODY, "max_tokens": max_tokens, "ignore_eos": True, "timeline": True}
    return cluster.post("/v1/completions", body)


def decoded_on(answer: dict[str, Any]) -> str:
    return str(answer["timeline"]["stages"][-1]["node"])


def states(cluster: Served) -> dict[str, str]:
    return {node["name"]: node["state"] for node in cluster.status()["nodes"]}


def until(cluster: Served, wanted: dict[str, str]) -> None:
    deadline_s = time.monotonic() + 30
    while (found := states(cluster)) != wanted:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.2)


def test_nodes_come_drain_and_go_and_no_request_is_lost(cluster: Served) -> None:
    right = ask(cluster, 300)["choices"][0]["token_ids"]
    num_processes = len(descendants(cluster.process.pid))
    assert order("scale", "decode", "2") == "decode: 1 -> 2; starting decode-1"
    cluster.wait_for("cluster +decode-1 serves", START_TIMEOUT_S)
    ready = dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "ready")
    until(cluster, ready)

    order("drain", "decode-0")
    assert states(cluster) == {**ready, "decode-0": "draining"}
    assert [decoded_on(ask(cluster, 3)) for _ in range(3)] == ["decode-1"] * 3

    answers: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: answers.append(ask(cluster, 300)))
    running.start()
    deadline_s = time.monotonic() + 30
    while not any(n["running"] for n in cluster.status()["nodes"] if n["name"] == "decode-1"):
        assert time.monotonic() < deadline_s
    order("drain", "decode-0", "--undo")
    assert order("scale", "decode", "1") == "decode: 2 -> 1; ending decode-1"
    cluster.wait_for("cluster +decode-1 has ended", START_TIMEOUT_S)
    running.join()
    assert decoded_on(answers[0]) == "decode-1", "it finished where it was"
    assert answers[0]["choices"][0]["token_ids"] == right
    until(cluster, dict.fromkeys(("prefill-0", "decode-0"), "ready"))
    assert ask(cluster, 300)["choices"][0]["token_ids"] == right
    cluster.wait_until_idle()
    assert len(descendants(cluster.process.pid)) == num_processes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("drain", "decode-7"), "node: got 'decode-7', there are prefill-0, decode-0"),
        (("scale", "decode", "0"), "count: got 0, allowed are 1 to 1024 decode nodes"),
        (("scale", "router", "2"), "role: got 'router', allowed are prefill, decode"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    cluster: Served, words: tuple[str, ...], problem: str
) -> None:
    done = subprocess.run(
        [*PDSERVE, *words, "--name", NAME], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
