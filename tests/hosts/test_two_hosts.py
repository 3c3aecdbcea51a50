"""Prefill on one host, decode on another: answers are the reference's, and a cut wire ends as
DESIGN says: local prefill where the decode node is left, an error by name where it is not, and all
as before once the wire is whole.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.golden import CASES, SHORT_CASES, body_of, first_difference
from tests.cluster.served import PDSERVE, START_TIMEOUT_S, Served
from tests.hosts.namespaces import INTERFACE, POSSIBLE, Host, RayHosts, two_hosts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not POSSIBLE, reason="network namespaces need root and `ip`"),
]

ASK_TIMEOUT_S = 300.0
CUT_S = 9.0  # longer than network.silence_s, shorter than Ray takes to give a host up
HEAL_TIMEOUT_S = 60.0
ASK_ALL = """
import json, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
url, bodies = sys.argv[1], json.load(open(sys.argv[2]))
def ask(body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)
with ThreadPoolExecutor(8) as pool:
    print(json.dumps(list(pool.map(ask, bodies))))
"""
READ = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A cluster over two hosts; the router is on the head."""

    hosts: RayHosts
    url: str
    folder: Any  # for files that both read

    def ask(self, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        bodies = self.folder / "bodies.json"
        bodies.write_text(json.dumps([body_of(case) for case in cases]))
        said = self.hosts.head.ask(
            ASK_ALL, f"{self.url}/v1/completions", str(bodies), timeout_s=ASK_TIMEOUT_S
        )
        answers = json.loads(said)
        assert isinstance(answers, list)
        return answers

    def status(self) -> dict[str, Any]:
        status = json.loads(self.hosts.head.ask(READ, f"{self.url}/admin/status", timeout_s=30))
        assert isinstance(status, dict)
        return status

    def wait_until_ready(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + HEAL_TIMEOUT_S
        while (status := self.status())["state"] != "ready":
            assert time.monotonic() < deadline_s, status
            time.sleep(0.5)
        return status

    def host_of(self, role: str) -> str:
        (node,) = (node for node in self.status()["nodes"] if node["role"] == role)
        host: str = node["ranks"][0]["host"]
        return host


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    # The router and one node fill the head; the other node has room on the other host alone.
    with two_hosts(head_cpus=3, other_cpus=2) as hosts:
        settings = {
            "ray.address": hosts.ray_address,
            "network.interface": INTERFACE,
            "network.port_range": "[20000, 20100]",
            "router.host": hosts.head.address,
            "router.local_prefill_below": 0,
            "router.http_port": 8000,
            "router.grpc_port": 8001,
        }
        words = [f"--set={key}={value}" for key, value in settings.items()]
        process = subprocess.Popen(
            hosts.head.command(*PDSERVE, "serve", "--name", hosts.head.namespace, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=hosts.env,
        )
        cluster = Served(process)
        try:
            cluster.wait_for("ready", START_TIMEOUT_S)
            url = f"http://{hosts.head.address}:8000"
            yield Spread(hosts=hosts, url=url, folder=tmp_path_factory.mktemp("hosts"))
        finally:
            cluster.stop()


def right(cases: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[str | None]:
    return [
        first_difference(case, answer["choices"][0]["token_ids"])
        if "choices" in answer
        else str(answer)
        for case, answer in zip(cases, answers, strict=True)
    ]


def test_golden_answers_come_across_hosts_all_disaggregated(spread: Spread) -> None:
    before = spread.wait_until_ready()["routes"]["disaggregated"]
    assert {spread.host_of("prefill"), spread.host_of("decode")} == {"10.77.0.1", "10.77.0.2"}
    answers = spread.ask(CASES)
    assert right(CASES, answers) == [None] * len(CASES)
    assert spread.status()["routes"]["disaggregated"] - before == len(CASES)


def test_nodes_announce_their_hosts_address_and_ports_of_the_range(spread: Spread) -> None:
    for node in spread.wait_until_ready()["nodes"]:
        host, _, port = node["address"].rpartition(":")
        assert host in ("10.77.0.1", "10.77.0.2")
        assert 20000 <= int(port) <= 20100


def test_a_cut_wire_leaves_local_prefill_or_a_named_error_and_heals(spread: Spread) -> None:
    spread.wait_until_ready()
    decode_is_left = spread.host_of("decode") == spread.hosts.head.address
    other: Host = spread.hosts.other
    other.set_wire("down")
    try:
        time.sleep(CUT_S)  # the silence that is tested
        began_s = time.monotonic()
        answers = spread.ask(SHORT_CASES[:1])
        took_s = time.monotonic() - began_s
    finally:
        other.set_wire("up")
    if decode_is_left:
        assert right(SHORT_CASES[:1], answers) == [None]
        assert answers[0]["timeline"]["route"] in ("local", "fallback")
    else:
        assert "no decode node" in answers[0]["error"]["message"], answers
        assert took_s < 45
    spread.wait_until_ready()
    assert right(SHORT_CASES, spread.ask(SHORT_CASES)) == [None] * len(SHORT_CASES)
