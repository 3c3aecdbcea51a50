"""`pdserve keys add` and `pdserve certs`: what they write, for whose eyes, and what they refuse."""

import io
import ssl
import stat
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.core.api_keys import find_key, new_key, parse_keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_shown_once_and_kept_as_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    assert cli.main(["keys", "add", "alice", "--file", str(file)]) == 0
    alice = capsys.readouterr().out.strip()
    assert cli.main(["keys", "add", "grafana", "--operator", "--file", str(file)]) == 0
    grafana = capsys.readouterr().out.strip()
    kept = parse_keys(file.read_text(), "file")
    found = [find_key(kept, key) for key in (alice, grafana)]
    assert [(key.tenant, key.is_operator) for key in found if key] == [
        ("alice", False),
        ("grafana", True),
    ]
    assert alice not in file.read_text()
    assert mode(file) == 0o600


def test_a_key_of_ones_own_is_hashed_from_stdin_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert cli.main(["keys", "add", "bob", "--stdin"]) == 0
    shown = capsys.readouterr()
    assert key not in shown.out + shown.err
    assert find_key(parse_keys(shown.err, "stderr"), key)


@pytest.mark.parametrize("name", ["a b", "a\nb", "", "x" * 65])
def test_a_name_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "add", name]) == cli.EXIT_WRONG_INPUT
    assert "name of a key" in capsys.readouterr().err


def test_no_line_is_added_to_what_is_no_file_of_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice plain-text-key")
    assert cli.main(["keys", "add", "bob", "--file", str(file)]) == cli.EXIT_WRONG_INPUT
    assert "line 1" in capsys.readouterr().err
    assert file.read_text() == "alice plain-text-key"


def test_certificates_are_made_once_and_keys_are_their_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert cli.main(["certs", str(folder), "--host", "example.org", "--host", "10.0.0.1"]) == 0
    assert f"tls_certificate: {folder / 'router.pem'}" in capsys.readouterr().out
    assert mode(folder) == 0o700
    assert {path.name for path in folder.iterdir() if mode(path) == 0o600} == {
        "router-key.pem",
        "cluster-key.pem",
    }
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for name in ("router", "cluster"):
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}-key.pem")
    assert cli.main(["certs", str(folder)]) == cli.EXIT_WRONG_INPUT
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--days", "0"], "--days"),
        (["--days", "99999"], "--days"),
        (["--host", "é" * 300], "--host"),
    ],
)
def test_certificates_that_cannot_be_are_refused(
    tmp_path: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["certs", str(tmp_path / "certs"), *words]) == cli.EXIT_WRONG_INPUT
    assert problem in capsys.readouterr().err
