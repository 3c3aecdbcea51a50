"""Where a cluster's secret and keys come from, and what is said of what is open."""

from pathlib import Path
from typing import Any

import pytest

from pdserve.cluster.protection import Protection, find_protection, gaps, settled
from pdserve.core.api_keys import hashed, line_of, new_key
from pdserve.core.config import ClusterConfig
from pdserve.core.config_file import parse_config
from pdserve.core.errors import ConfigError
from pdserve.core.security_config import SecurityConfig

GIVEN = "g" * 40
OPEN_ROUTER = {"host": "0.0.0.0"}
TLS = {"tls_certificate": "c", "tls_key": "k"}
MUTUAL = {"cluster_ca": "a", "cluster_certificate": "c", "cluster_key": "k"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDSERVE_CLUSTER_SECRET", "PDSERVE_API_KEYS"):
        monkeypatch.delenv(name, raising=False)


def secret_file(folder: Path, text: str = GIVEN, mode: int = 0o600) -> SecurityConfig:
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return SecurityConfig(cluster_secret_file=str(file))


def test_a_secret_is_drawn_where_none_is_given() -> None:
    first, second = (find_protection(SecurityConfig()) for _ in range(2))
    assert first.secret is not None
    assert len(first.secret) >= 32
    assert first.secret != second.secret
    assert first.secret not in repr(first)
    assert first.access(SecurityConfig()).secret == first.secret


def test_what_comes_by_the_environment_does_not_stay_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = hashed(new_key(), tenant="alice")
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", GIVEN)
    monkeypatch.setenv("PDSERVE_API_KEYS", line_of(key))
    found = find_protection(SecurityConfig())
    assert (found.secret, found.api_keys) == (GIVEN, (key,))
    again = find_protection(SecurityConfig())
    assert again.secret != GIVEN
    assert again.api_keys is None


def test_a_secret_in_a_file_is_read_by_each_host_and_sent_to_none(tmp_path: Path) -> None:
    security = secret_file(tmp_path, f"{GIVEN}\n")
    found = find_protection(security)
    assert found.secret is None
    assert found.access(security).secret == GIVEN


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("short", 0o600, "it has 5 characters, at least 32"),
        (GIVEN, 0o644, "everybody may read it"),
        ("", 0o600, "it has 0 characters"),
    ],
)
def test_a_secret_that_is_none_is_refused_and_not_shown(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        find_protection(secret_file(tmp_path, text, mode))
    assert GIVEN not in str(raised.value)


def test_a_short_secret_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", "weakness")
    with pytest.raises(ConfigError, match="PDSERVE_CLUSTER_SECRET: it has 8") as raised:
        find_protection(SecurityConfig())
    assert "weakness" not in str(raised.value)


def test_two_secrets_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", GIVEN)
    with pytest.raises(ConfigError, match="give one of them"):
        find_protection(secret_file(tmp_path))


def test_keys_in_the_clear_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-plain-as-day")
    with pytest.raises(ConfigError, match="line 1") as raised:
        find_protection(SecurityConfig(api_keys_file=str(file)))
    assert "plain-as-day" not in str(raised.value)
    monkeypatch.setenv("PDSERVE_API_KEYS", "alice sk-plain-as-day")
    with pytest.raises(ConfigError, match="PDSERVE_API_KEYS, line 1") as raised:
        find_protection(SecurityConfig())
    assert "plain-as-day" not in str(raised.value)


def test_paths_are_whole_and_files_are_there_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("")
    assert settled(SecurityConfig(api_keys_file="keys")).api_keys_file == str(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"security.api_keys_file: .*nowhere: cannot be read"):
        settled(SecurityConfig(api_keys_file="nowhere"))


@pytest.mark.parametrize(
    ("file", "transport", "words"),
    [
        ({}, "grpc", []),
        ({"router": OPEN_ROUTER}, "grpc", ["no API key is asked"]),
        ({"router": {"host": "::"}}, "grpc", ["no API key is asked"]),
        ({"router": {"host": "10.0.0.1"}, "security": TLS}, "grpc", ["no API key is asked"]),
        ({"router": OPEN_ROUTER, "security": {"api_keys_file": "f"}}, "grpc", ["in the clear"]),
        ({"router": OPEN_ROUTER, "security": {"api_keys_file": "f"} | TLS}, "grpc", []),
        ({"network": {"interface": "eth0"}}, "grpc", ["between nodes are not encrypted"]),
        ({"network": {"interface": "eth0"}, "security": MUTUAL}, "grpc", []),
        ({"network": {"interface": "eth0"}, "security": MUTUAL}, "nccl", ["KV over nccl"]),
        ({"network": {"interface": "eth0"}, "security": MUTUAL}, "cuda_ipc", []),
    ],
)
def test_what_is_open_is_said_in_a_line(
    file: dict[str, Any], transport: str, words: list[str]
) -> None:
    config: ClusterConfig = parse_config(file)
    said = list(gaps(config, Protection(secret=GIVEN), transport))
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))
