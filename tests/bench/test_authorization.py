"""Benchmarks call with the key of the environment."""

import pytest

from pdserve.bench.authorization import headers


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "sk-one")
    assert headers() == {"Authorization": "Bearer sk-one"}
    monkeypatch.delenv("PDSERVE_API_KEY")
    assert headers() == {}
