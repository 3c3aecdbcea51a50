"""What processes are told through their environment."""

import os

import pytest

from pdserve.core.environment import set_up_front

NAME = "GRPC_EXPERIMENTS"


@pytest.mark.parametrize(("given", "then"), [(None, "-event_engine"), ("tcp_rcv_lowat", "tcp_rcv")])
def test_a_front_asks_grpc_for_fewer_threads_unless_the_user_asks_for_something(
    given: str | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, given or "")  # so that the end of the test finds what was before
    if given is None:
        monkeypatch.delenv(NAME)
    set_up_front()
    assert os.environ[NAME].startswith(then)
