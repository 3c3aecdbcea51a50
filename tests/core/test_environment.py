"""What processes are told through their environment."""

import os

import pytest

from pdserve.core.environment import set_up_front


@pytest.mark.parametrize(("given", "then"), [(None, "-event_engine"), ("tcp_rcv_lowat", "tcp_rcv")])
def test_a_front_asks_grpc_for_fewer_threads_unless_the_user_asks_for_something(
    given: str | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    if given is not None:
        monkeypatch.setenv("GRPC_EXPERIMENTS", given)
    set_up_front()
    assert os.environ["GRPC_EXPERIMENTS"].startswith(then)
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")  # what was set above is undone with it
