"""The order of the router's queue: nothing lost or doubled, fair, by priority, without starving."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.waiting import MAX_TAGS_KEPT, Demand, Ticket, WaitingQueue

STEP_S = 10.0


def ticket(
    name: str,
    *,
    tenant: str = "a",
    prompt_class: str = "short",
    priority: int = 0,
    work: float = 1.0,
    queued_s: float = 0.0,
    deadline_s: float = 1e9,
) -> Ticket:
    return Ticket(
        request_id=name,
        tenant=tenant,
        prompt_class=prompt_class,
        priority=priority,
        demand=Demand(prompt_len=1, max_tokens=1, num_choices=1),
        work=work,
        queued_s=queued_s,
        deadline_s=deadline_s,
    )


def filled(*tickets: Ticket) -> WaitingQueue:
    queue = WaitingQueue(priority_step_s=STEP_S)
    for item in tickets:
        queue.add(item)
    return queue


def served(queue: WaitingQueue) -> list[str]:
    """All that waits, in the order in which it is served."""
    names = []
    while (first := queue.first()) is not None:
        names.append(queue.take(first.request_id).request_id)
    return names


def test_equals_are_served_by_arrival() -> None:
    assert served(filled(*(ticket(str(i), queued_s=i) for i in range(5)))) == list("01234")


@pytest.mark.parametrize(
    ("late_s", "first"),
    [(0.0, "urgent"), (STEP_S - 0.1, "urgent"), (STEP_S + 0.1, "plain")],
)
def test_a_step_of_priority_is_worth_so_many_seconds(late_s: float, first: str) -> None:
    queue = filled(ticket("plain"), ticket("urgent", priority=-1, queued_s=late_s))
    assert served(queue)[0] == first


def test_a_low_priority_is_served_however_many_of_a_higher_one_come() -> None:
    queue = filled(ticket("low", priority=3))
    for second in range(1, 100):
        queue.add(ticket(f"high {second}", queued_s=second))
        first = queue.first()
        assert first is not None
        queue.take(first.request_id)
        if first.request_id == "low":
            assert 3 * STEP_S <= second <= 3 * STEP_S + 1
            return
    pytest.fail("it starved")


def test_tenants_take_turns_however_much_one_of_them_sends() -> None:
    flood = [ticket(f"a{i}", tenant="a") for i in range(50)]
    few = [ticket(f"b{i}", tenant="b", queued_s=1.0) for i in range(3)]
    assert served(filled(*flood, *few))[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_turns_are_by_work_not_by_requests() -> None:
    large = [ticket(f"a{i}", tenant="a", work=4.0) for i in range(3)]
    small = [ticket(f"b{i}", tenant="b", work=1.0) for i in range(8)]
    assert served(filled(*large, *small))[:7] == ["a0", "b0", "b1", "b2", "b3", "a1", "b4"]


def test_who_was_away_has_saved_nothing_up() -> None:
    queue = filled(*(ticket(f"a{i}", tenant="a") for i in range(20)))
    for _ in range(10):
        first = queue.first()
        assert first is not None
        queue.take(first.request_id)
    for i in range(5):
        queue.add(ticket(f"b{i}", tenant="b"))
    assert [name[0] for name in served(queue)][:6] in (list("ababab"), list("bababa"))


def test_who_leaves_for_a_moment_does_not_lose_what_it_was_served() -> None:
    queue = filled(
        ticket("a0", tenant="a", work=9.5), *(ticket(f"b{i}", tenant="b") for i in range(20))
    )
    queue.take("a0")
    queue.add(ticket("a1", tenant="a"))
    assert served(queue).index("a1") == 10


def test_classes_of_a_tenant_are_offered_side_by_side() -> None:
    queue = filled(
        ticket("l0", prompt_class="long"),
        ticket("l1", prompt_class="long", queued_s=1.0),
        ticket("s0", queued_s=2.0),
    )
    assert [item.request_id for item in queue.in_order(8)] == ["l0", "s0"]


def test_deadlines_are_told_in_their_order_and_only_of_those_that_wait() -> None:
    queue = filled(*(ticket(str(i), deadline_s=10.0 - i) for i in range(4)))
    queue.take("3")
    assert queue.next_deadline_s() == 8.0
    assert queue.expired(7.9) is None
    late = queue.expired(8.0)
    assert late is not None
    assert late.request_id == "2"


def test_tenants_that_were_here_once_are_not_remembered_for_ever() -> None:
    queue = filled(*(ticket(f"z{i}", tenant="z", work=1e6) for i in range(2)))
    queue.take("z0")
    for i in range(10 * MAX_TAGS_KEPT):
        queue.add(ticket(str(i), tenant=f"t{i}"))
        queue.take(str(i))
    level = queue._levels[0]
    assert len(level._tags) <= 2 * (MAX_TAGS_KEPT + 1)
    assert len(queue._deadlines) <= MAX_TAGS_KEPT + 3


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "overtake", "remove", "expire"]),
        st.sampled_from("abc"),  # tenant
        st.sampled_from(["short", "long"]),
        st.integers(-2, 2),  # priority
        st.integers(1, 50),  # work
    ),
    max_size=80,
)


@given(OPERATIONS)
def test_nothing_is_lost_or_doubled_and_each_flow_leaves_by_arrival(
    operations: list[tuple[str, str, str, int, int]],
) -> None:
    queue = WaitingQueue(priority_step_s=STEP_S)
    inside: dict[str, Ticket] = {}
    for number, (what, tenant, prompt_class, priority, work) in enumerate(operations):
        now_s = float(number)
        offered = list(queue.in_order(16))
        match what:
            case "add":
                name = f"r{number}"
                inside[name] = ticket(
                    name,
                    tenant=tenant,
                    prompt_class=prompt_class,
                    priority=priority,
                    work=work,
                    queued_s=now_s,
                    deadline_s=now_s + work,
                )
                queue.add(inside[name])
            case "take" | "overtake" if offered:
                chosen = offered[0 if what == "take" else -1]
                assert queue.take(chosen.request_id) is inside.pop(chosen.request_id)
                same = (chosen.tenant, chosen.prompt_class, chosen.priority)
                assert all(
                    other.queued_s > chosen.queued_s
                    for other in inside.values()
                    if (other.tenant, other.prompt_class, other.priority) == same
                )
            case "remove" if inside:
                name = sorted(inside)[work % len(inside)]
                assert queue.remove(name) is inside.pop(name)
                assert queue.remove(name) is None
            case "expire":
                while (late := queue.expired(now_s)) is not None:
                    assert late.deadline_s <= now_s
                    queue.remove(late.request_id)
                    del inside[late.request_id]
                assert all(item.deadline_s > now_s for item in inside.values())
        assert {item.request_id for item in queue} == set(inside)
        assert len(queue) == len(inside)
        flows = {(t.tenant, t.prompt_class, t.priority) for t in inside.values()}
        assert len(list(queue.in_order(16))) == len(flows)
    assert set(served(queue)) == set(inside)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=1, max_size=120))
def test_no_waiting_tenant_falls_behind_another_by_more_than_two_requests_of_work(
    arrivals: list[tuple[str, int]],
) -> None:
    queue = WaitingQueue(priority_step_s=STEP_S)
    for number, (tenant, work) in enumerate(arrivals):
        queue.add(ticket(str(number), tenant=tenant, work=work, queued_s=number))
    largest = max(work for _, work in arrivals)
    left = Counter(tenant for tenant, _ in arrivals)
    got: defaultdict[str, float] = defaultdict(float)
    while (first := queue.first()) is not None:
        queue.take(first.request_id)
        got[first.tenant] += first.work
        left[first.tenant] -= 1
        still = [got[tenant] for tenant, count in left.items() if count > 0]
        assert not still or max(still) - min(still) <= 2 * largest
