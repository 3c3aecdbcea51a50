"""Who is silent for too long, and for whom that is not known."""

from pdserve.core.silence import LOOK_S, Silence


def looks(silence: Silence[str], start_s: float, stop_s: float) -> dict[float, list[str]]:
    """What each look from ``start_s`` on finds, those that find nobody left out."""
    found = {}
    now_s = start_s
    while now_s <= stop_s:
        if silent := silence.look(now_s):
            found[now_s] = silent
        now_s += LOOK_S
    return found


def test_a_peer_that_says_nothing_is_found_at_the_limit() -> None:
    silence = Silence(["a", "b"], limit_s=5.0, now_s=100.0)
    assert looks(silence, 101.0, 103.0) == {}
    silence.heard("b")
    assert looks(silence, 104.0, 107.0) == {105.0: ["a"], 106.0: ["a"], 107.0: ["a"]}
    assert looks(silence, 108.0, 108.0) == {108.0: ["a", "b"]}


def test_a_listener_that_slept_blames_nobody_for_that_time() -> None:
    silence = Silence(["a"], limit_s=5.0, now_s=0.0)
    assert silence.look(1.0) == []
    assert silence.look(600.0) == []
    silence.heard("a")
    assert looks(silence, 601.0, 604.0) == {}
    assert silence.look(605.0) == ["a"]


def test_time_in_which_a_peer_got_no_cpu_counts_up_to_a_bound_only() -> None:
    silence = Silence(["a", "b"], limit_s=5.0, now_s=0.0)
    found = {now_s: silence.look(float(now_s), ["a"]) for now_s in range(1, 32)}
    assert {peer: min(t for t in found if peer in found[t]) for peer in "ab"} == {"b": 5, "a": 30}


def test_a_peer_that_is_heard_starves_anew() -> None:
    silence = Silence(["a"], limit_s=5.0, now_s=0.0)
    for now_s in range(1, 21):
        assert silence.look(float(now_s), ["a"]) == []
    silence.heard("a")
    assert looks(silence, 21.0, 25.0) == {25.0: ["a"]}


def test_only_who_was_not_heard_lately_is_worth_a_look() -> None:
    silence = Silence(["a", "b"], limit_s=5.0, now_s=0.0)
    silence.look(1.0)
    silence.heard("b")
    silence.look(2.0)
    assert silence.quiet == ["a"]
