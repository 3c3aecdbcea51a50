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
            "ranks": [],
            "free_blocks": None,
            "total_blocks": None,
            "running": None,
            "waiting": None,
        },
        {
            "name": "decode-0",
            "role": "decode",
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
    head, columns, prefill, decode, routes = capsys.readouterr().out.splitlines()
    assert head.endswith(": degraded (prefill-0: not connected)")
    assert columns.split() == ["node", "blocks", "free", "running", "waiting", "ranks", "(pid)"]
    assert prefill.split() == ["prefill-0", "–/–", "–", "–", "not", "connected"]
    assert decode.split() == ["decode-0", "1480/1489", "2", "1", "11@127.0.0.1,", "12@127.0.0.1"]
    assert routes == "routes: 5 disaggregated, 7 local, 0 fallback"


def test_a_router_that_does_not_answer_is_named(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--url", "http://127.0.0.1:1"]) == cli.EXIT_FAILED
    assert "no router answers at http://127.0.0.1:1: " in capsys.readouterr().err
    assert cli.main(["status", "--url", f"{url}/elsewhere"]) == cli.EXIT_FAILED
    assert "is no pdserve router" in capsys.readouterr().err
