"""A benchmark says where its prompts were prefilled."""

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdserve.bench.serve import add_arguments, run
from pdserve.core.errors import ConfigError

ROUTES = {"disaggregated": 5, "local": 2, "fallback": 0}


class Server(BaseHTTPRequestHandler):
    """A router that prefills every prompt itself, or another server, which has no status."""

    routes: dict[str, int] | None = None

    def do_GET(self) -> None:
        self.answer({"routes": self.routes} if self.routes else None)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.routes:
            self.routes["local"] += 1
        self.send_response(200)
        self.end_headers()
        events = [
            {"choices": [{"text": "x"}]},
            {"choices": [], "usage": {"completion_tokens": 1}},
        ]
        self.wfile.write(b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events))

    def answer(self, body: object) -> None:
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def serve() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("told", [True, False])
def test_a_run_without_a_handoff_says_so(
    serve: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "routes", dict(ROUTES) if told else None)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = f"--base-url {serve} --model m --num-prompts 3 --random-output-len 1 --json"
    assert run(parser.parse_args(words.split())) == 0
    results = json.loads(capsys.readouterr().out)
    assert results.get("routes") == (
        {"disaggregated": 0, "local": 3, "fallback": 0} if told else None
    )


@pytest.mark.parametrize("model", ["", "--model m"])
@pytest.mark.parametrize("url", ["http://[::", "[::", "http://x:port"])
def test_what_is_no_address_is_refused_by_its_option(url: str, model: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match=r"^--base-url: got "):
        run(parser.parse_args(["--base-url", url, *model.split()]))
