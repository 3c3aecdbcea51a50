"""`pdserve role` on a cluster that serves: requests run while nodes change their roles."""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdserve.cluster.run_file import run_folder, running
from tests.cluster.processes import descendants
from tests.cluster.served import PDSERVE, START_TIMEOUT_S, Served, served
from tests.faults.tiny_model import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NAME = "test-roles"
NUM_CLIENTS = 3
PROMPTS = [[(5 + 3 * i + 7 * j) % 500 for j in range(20 + 40 * i)] for i in range(6)]
LONG = {"prompt": PROMPTS[5], "max_tokens": 400}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    overrides = {
        "model.source": make_tiny_model(tmp_path_factory.mktemp("model")),
        "model.load_format": "dummy",
        "prefill.kv_cache_bytes": 16 << 20,
        "decode.kv_cache_bytes": 16 << 20,
        "decode.replicas": 2,
        "router.local_prefill_below": 24,
    }
    with served(overrides, "--name", NAME) as cluster:
        yield cluster


def order(*words: str) -> str:
    """What a command answers, within the time that it may take."""
    done = subprocess.run(
        [*PDSERVE, *words, "--name", NAME, "--json"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["message"])


def change(cluster: Served, node: str, before: str, after: str) -> None:
    """Change a node's role and wait until it serves, connected, in the new one."""
    told = order("role", node, after)
    assert told == f"{node}: {before} -> {after}, once it has finished what it holds"
    cluster.wait_for(f"cluster +{node} serves as a {after} node", START_TIMEOUT_S)
    deadline_s = time.monotonic() + 30
    while not all(shown["ready"] for shown in cluster.status()["nodes"]):
        assert time.monotonic() < deadline_s, cluster.status()


def roles(cluster: Served) -> dict[str, str]:
    return {node["name"]: node["role"] for node in cluster.status()["nodes"]}


def pids(cluster: Served) -> dict[str, list[int]]:
    return {
        node["name"]: [rank["pid"] for rank in node["ranks"]] for node in cluster.status()["nodes"]
    }


def ask(cluster: Served, **body: object) -> dict[str, Any]:
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    wanted = {"return_token_ids": True, "timeline": True}
    return cluster.post("/v1/completions", {**fields, **wanted, **body})


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def nodes_of(answer: dict[str, Any], stage: str) -> set[str]:
    stages = answer["timeline"]["stages"]
    return {each["node"] for each in stages if each["name"] == stage}


class Clients:
    """Ask the same prompts over and over until the block ends; each answer has to be right."""

    def __init__(self, cluster: Served, right: list[list[int]]) -> None:
        self._cluster = cluster
        self._right = right
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self.answers: list[dict[str, Any]] = []

    def __enter__(self) -> "Clients":
        self._running = [self._pool.submit(self._ask, i) for i in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for client in self._running:
            client.result()

    def _ask(self, first: int) -> None:
        number = first
        while not self._over.is_set():
            number = (number + 1) % len(PROMPTS)
            answer = ask(self._cluster, prompt=PROMPTS[number])
            assert tokens(answer) == self._right[number]
            self.answers.append(answer)


def test_roles_change_back_and_forth_while_requests_run(cluster: Served) -> None:
    right = [tokens(ask(cluster, prompt=prompt)) for prompt in PROMPTS]
    before, num_processes = pids(cluster), len(descendants(cluster.process.pid))
    with Clients(cluster, right) as clients:
        change(cluster, "decode-1", "decode", "prefill")
        in_both = len(clients.answers)
        deadline_s = time.monotonic() + 60
        while not any(nodes_of(a, "prefill") == {"decode-1"} for a in clients.answers[in_both:]):
            assert time.monotonic() < deadline_s, "nothing is prefilled on decode-1"
            time.sleep(0.1)
        assert roles(cluster) == {
            "prefill-0": "prefill",
            "decode-1": "prefill",
            "decode-0": "decode",
        }
        assert run_file_roles() == roles(cluster)
        assert 'node_ready{node="decode-1",role="prefill"} 1' in metrics(cluster)
        change(cluster, "decode-1", "prefill", "decode")
        change(cluster, "prefill-0", "prefill", "decode")
        change(cluster, "decode-0", "decode", "prefill")
        swapped = len(clients.answers)
        while not any(
            nodes_of(a, "first_decode") == {"prefill-0"} for a in clients.answers[swapped:]
        ):
            assert time.monotonic() < deadline_s + 60, "nothing is decoded on prefill-0"
            time.sleep(0.1)
        change(cluster, "decode-0", "prefill", "decode")
        change(cluster, "prefill-0", "decode", "prefill")
    routes = {answer["timeline"]["route"] for answer in clients.answers}
    assert routes >= {"disaggregated", "local"}
    status = cluster.wait_until_idle()
    assert [node["name"] for node in status["nodes"]] == ["prefill-0", "decode-0", "decode-1"]
    assert pids(cluster) == before, "the ranks live on"
    assert len(descendants(cluster.process.pid)) == num_processes


def test_a_node_that_dies_on_its_way_is_made_anew_in_the_role_that_was_ordered(
    cluster: Served,
) -> None:
    right = tokens(ask(cluster, **LONG))
    order("drain", "decode-0")
    with ThreadPoolExecutor(1) as pool:
        running_there = pool.submit(ask, cluster, **LONG)
        deadline_s = time.monotonic() + 30
        while not next(n["running"] for n in cluster.status()["nodes"] if n["name"] == "decode-1"):
            assert time.monotonic() < deadline_s
        order("drain", "decode-0", "--undo")
        order("role", "decode-1", "prefill")
        again = refused("role", "decode-1", "decode")
        assert "node: decode-1 is changing its role by an earlier `role`" in again
        os.kill(pids(cluster)["decode-1"][0], signal.SIGKILL)
        answer = running_there.result()
    assert tokens(answer) == right
    assert nodes_of(answer, "first_decode") == {"decode-0"}, "it went on there"
    cluster.wait_for("cluster +decode-1 serves again", START_TIMEOUT_S)
    cluster.wait_until_idle()
    assert roles(cluster)["decode-1"] == "prefill"
    change(cluster, "decode-1", "prefill", "decode")
    assert tokens(ask(cluster, **LONG)) == right


def test_the_last_decode_node_is_refused_by_name(cluster: Served) -> None:
    order("drain", "decode-1")
    assert "node: decode-0 is the last decode node that serves" in refused(
        "role", "decode-0", "prefill"
    )
    order("drain", "decode-1", "--undo")
    assert "role: got 'router', allowed are prefill, decode" in refused(
        "role", "decode-0", "router"
    )


def refused(*words: str) -> str:
    done = subprocess.run(
        [*PDSERVE, *words, "--name", NAME], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def metrics(cluster: Served) -> str:
    with urllib.request.urlopen(f"{cluster.http_url}/metrics", timeout=10) as response:
        return str(response.read().decode())


def run_file_roles() -> dict[str, str]:
    (record,) = [record for record in running(run_folder()) if record.name == NAME]
    return record.nodes
