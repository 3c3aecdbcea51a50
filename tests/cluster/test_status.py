"""`pdserve status` against a router that is nothing but an HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdserve import cli

STATUS = {
    "state": "degraded",
    "reason": "prefill-0: not connected",
    "nodes": [
        {
            "name": "prefill-0",
            "role": "prefill",
            "state": "lost",
            "reason": "rank 0 died",
            "troubles": [],
            "ranks": [],
            "free_blocks": None,
            "total_blocks": None,
            "running": None,
            "waiting": None,
        },
        {
            "name": "decode-0",
            "role": "decode",
            "state": "ready",
            "reason": None,
            "troubles": [{"node": "prefill-1", "stage": "link", "reason": "broken"}],
            "ranks": [
                {"rank": 0, "pid": 11, "host": "127.0.0.1"},
                {"rank": 1, "pid": 12, "host": "127.0.0.1"},
            ],
            "free_blocks": 1480,
            "total_blocks": 1489,
            "running": 2,
            "waiting": 1,
        },
    ],
    "routes": {"disaggregated": 5, "local": 7, "fallback": 0},
    "queues": [
        {"prompt_class": "short", "num_waiting": 0, "max_queued": None, "oldest_s": 0.0},
        {"prompt_class": "long", "num_waiting": 3, "max_queued": 8, "oldest_s": 1.26},
    ],
}


class Router(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(STATUS if self.path == "/admin/status" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_json_is_the_routers_own(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_the_table_shows_nodes_and_routes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url + "/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, columns, prefill, decode, reason, trouble, routes, queues = lines
    assert head.endswith(": degraded (prefill-0: not connected)")
    assert columns.split() == [
        "node",
        "role",
        "state",
        "blocks",
        "free",
        "running",
        "waiting",
        "ranks",
        "(pid)",
    ]
    lost = ["prefill-0", "prefill", "lost", "–/–", "–", "–", "not", "connected"]
    assert prefill.split() == lost
    assert decode.split()[:6] == ["decode-0", "decode", "ready", "1480/1489", "2", "1"]
    assert decode.split()[6:] == ["11@127.0.0.1,", "12@127.0.0.1"]
    assert reason == "prefill-0: rank 0 died"
    assert trouble == "decode-0 leaves prefill-1 alone: broken"
    assert routes == "routes: 5 disaggregated, 7 local, 0 fallback"
    assert queues == "waiting at the router: 0 short, 3 of 8 long (the oldest for 1.3 s)"


def test_an_address_without_a_scheme_is_enough(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--url", url.removeprefix("http://")]) == 0
    assert capsys.readouterr().out.startswith(f"{url}: degraded")


def test_a_router_that_does_not_answer_is_named(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--url", "http://127.0.0.1:1"]) == cli.EXIT_FAILED
    assert "no router answers at http://127.0.0.1:1: " in capsys.readouterr().err
    assert cli.main(["status", "--url", f"{url}/elsewhere"]) == cli.EXIT_FAILED
    assert "is no pdserve router" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["http://[::", "http://[x]:1", "", "http://", "[::"])
@pytest.mark.parametrize(
    "command",
    [["status"], ["drain", "decode-0"], ["scale", "decode", "2"], ["role", "decode-0", "prefill"]],
)
def test_what_is_no_address_is_refused_by_its_option(
    command: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--url", text]) == cli.EXIT_WRONG_INPUT
    assert capsys.readouterr().err.startswith(f"pdserve: --url: got {text!r}")
