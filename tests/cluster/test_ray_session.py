"""Joining a Ray cluster that is not there."""

import socket

import pytest

from pdserve.cluster.ray_session import joined_ray
from pdserve.cluster.signal_watch import watched_signals
from pdserve.core.errors import ConfigError


@pytest.mark.ray
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_no_ray_listens_is_refused_at_once_by_name(scheme: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"
        refused = pytest.raises(ConfigError, match=r"ray\.address: no Ray listens at")
        with watched_signals() as watch, refused, joined_ray(address, watch):
            pass
