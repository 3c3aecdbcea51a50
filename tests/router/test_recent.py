"""The rings behind the live page."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.recent import Ring


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(1, 8), added=st.integers(0, 30), asked=st.integers(0, 40))
def test_a_ring_gives_what_is_new_and_forgets_what_is_old(
    length: int, added: int, asked: int
) -> None:
    ring: Ring[int] = Ring(length)
    for item in range(1, added + 1):
        ring.add(item)
    kept = [(item, item) for item in range(1, added + 1)][-length:]
    known = asked if asked <= added else 0  # the number of another start's ring
    assert ring.since(asked) == [(number, item) for number, item in kept if number > known]
    assert ring.last == added
