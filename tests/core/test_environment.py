"""What processes are told through their environment."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pdserve.core.environment import set_up_front, set_up_gpu_rank

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


KERNELS = "FLASH_ATTENTION_CUTE_DSL_CACHE_"


@pytest.mark.parametrize("has_place", [True, False])
def test_a_rank_keeps_compiled_attention_where_there_is_a_place(
    has_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    if not has_place:
        cache.write_text("a file in the way")
    monkeypatch.setattr(os, "environ", {"PDSERVE_CACHE": str(cache)})
    set_up_gpu_rank()
    kept = {name: value for name, value in os.environ.items() if name.startswith(KERNELS)}
    place = {f"{KERNELS}ENABLED": "1", f"{KERNELS}DIR": str(cache / "flash_attn")}
    assert kept == (place if has_place else {})


def test_a_file_system_without_locks_is_no_place_for_compiled_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(os, "environ", {"PDSERVE_CACHE": str(tmp_path)})
    set_up_gpu_rank()
    assert not [name for name in os.environ if name.startswith(KERNELS)]
