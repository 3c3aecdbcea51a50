"""A real cluster with everything turned on: it serves, and its secrets are nowhere to be seen."""

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.client.client import Client
from pdserve.cluster.process_log import log_dir
from tests.cluster.served import PDSERVE, Served, served
from tests.security.certificates import write_files
from tests.security.keys import ALICE, FILE, OPERATOR, bearer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "sealed"
SECRET = "5ecret-" + 40 * "x"
QUESTION = "What is the capital of France? Answer in one sentence."
LONG = "The ferry crosses the river at nine. " * 40 + "It leaves at"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    served: Served
    ca_file: Path

    def get(self, path: str, key: str | None) -> tuple[int, Any]:
        headers = {} if key is None else bearer(key)
        request = urllib.request.Request(self.served.http_url + path, headers=headers)
        context = ssl.create_default_context(cafile=self.ca_file)
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    folder = write_files(tmp_path_factory.mktemp("sealed") / "certs")
    keys, secret = folder / "keys", folder / "secret"
    keys.write_text(FILE)
    secret.write_text(SECRET)
    secret.chmod(0o600)
    files = {
        "api_keys_file": keys,
        "cluster_secret_file": secret,
        "tls_certificate": folder / "router.pem",
        "tls_key": folder / "router-key.pem",
        "cluster_ca": folder / "cluster-ca.pem",
        "cluster_certificate": folder / "cluster.pem",
        "cluster_key": folder / "cluster-key.pem",
    }
    overrides = {f"security.{key}": path for key, path in files.items()}
    with served(overrides, "--name", NAME) as cluster:
        yield Sealed(served=cluster, ca_file=folder / "public-ca.pem")


def test_it_answers_who_has_a_key_both_ways(sealed: Sealed) -> None:
    address, ca_file = sealed.served.grpc_address, sealed.ca_file
    with Client(address, api_key=ALICE, ca_file=ca_file) as client:
        question = [{"role": "user", "content": QUESTION}]
        local = client.generate(question, max_tokens=16, temperature=0, timeline=True)
        remote = client.generate(LONG, max_tokens=4, temperature=0, timeline=True)
    assert "Paris" in local.choices[0].text
    assert remote.timeline is not None
    assert remote.timeline.route == "disaggregated"
    assert remote.timeline.kv_bytes > 0
    assert sealed.get("/v1/models", ALICE)[0] == 200
    assert sealed.get("/v1/models", None)[0] == 401


def test_operators_see_it_with_their_key_or_from_its_host(sealed: Sealed) -> None:
    assert sealed.get("/admin/status", ALICE)[0] == 403
    status, told = sealed.get("/admin/status", OPERATOR)
    assert (status, told["state"]) == (200, "ready")
    done = subprocess.run(
        [*PDSERVE, "status", "--name", NAME], capture_output=True, text=True, check=True, timeout=60
    )
    assert "decode-0" in done.stdout


def test_no_secret_is_in_a_log_or_on_a_command_line(sealed: Sealed) -> None:
    status, _ = sealed.get("/v1/models", "x" * 40)
    assert status == 401
    logs = [path.read_text(encoding="utf-8") for path in log_dir(NAME).iterdir()]
    printed = "\n".join([*logs, *sealed.served.lines])
    assert "request" in printed
    commands = b"".join(map(_command_line, Path("/proc").glob("[0-9]*")))
    for secret in (SECRET, ALICE, OPERATOR, "x" * 40):
        assert secret not in printed
        assert secret.encode() not in commands
    assert QUESTION not in printed


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
