"""Who comes first, front or rank, makes no difference; and either end is noticed."""

import threading

import pytest

from pdserve.core.errors import RankError
from pdserve.rank.lifeline import FrontLifeline, wait_for_front


def test_a_rank_that_comes_first_is_let_in(tmp_path):
    path = tmp_path / "lifeline"
    let_in = threading.Event()

    def rank() -> None:
        wait_for_front(path, timeout_s=5).close()
        let_in.set()

    thread = threading.Thread(target=rank)
    thread.start()
    front = FrontLifeline(path)
    front.release()
    assert let_in.wait(5)
    thread.join()
    front.close()


def test_a_rank_that_comes_later_is_let_in_and_sees_the_fronts_end(tmp_path):
    front = FrontLifeline(tmp_path / "lifeline")
    front.release()
    rank = wait_for_front(tmp_path / "lifeline", timeout_s=0)
    front.close()
    front.close()
    assert rank.wait_for_end()
    rank.close()


def test_a_woken_watch_is_not_the_fronts_end(tmp_path):
    front = FrontLifeline(tmp_path / "lifeline")
    front.release()
    rank = wait_for_front(tmp_path / "lifeline", timeout_s=0)
    rank.wake()
    assert not rank.wait_for_end()
    rank.close()
    front.close()


def test_a_front_that_never_lets_in_is_an_error_at_the_deadline(tmp_path):
    front = FrontLifeline(tmp_path / "lifeline")
    with pytest.raises(RankError, match=r"the front did not start within 0\.05 s"):
        wait_for_front(tmp_path / "lifeline", timeout_s=0.05)
    front.close()


def test_a_run_directory_that_does_not_exist_is_a_named_error(tmp_path):
    with pytest.raises(RankError, match="cannot be made"):
        wait_for_front(tmp_path / "none" / "lifeline", timeout_s=0)
