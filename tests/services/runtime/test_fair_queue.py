"""Whose work comes next: by the seconds that tenants were given, with a place kept for another
one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.services.runtime.errors import LimitExceeded
from headwater.services.runtime.fair_queue import FairQueue, QueueLimits

LIMITS = QueueLimits(num_waiting=4, num_bytes=1000)


def queue_of(num_places: int, limits: QueueLimits = LIMITS) -> FairQueue[str]:
    return FairQueue("work", num_places, limits)


def begun(queue: FairQueue[str]) -> list[str]:
    """Entries that get a place now."""
    return list(iter(queue.next, None))


def test_one_tenant_takes_all_places_but_one_and_another_takes_that_at_once() -> None:
    queue = queue_of(4)
    for i in range(4):
        queue.add("a", f"a{i}", 1)
    assert begun(queue) == ["a0", "a1", "a2"]
    queue.add("b", "b0", 1)
    assert begun(queue) == ["b0"]


def test_a_tenant_takes_no_third_place_while_another_one_waits() -> None:
    queue = queue_of(4)
    for tenant in "ab":
        for i in range(3):
            queue.add(tenant, f"{tenant}{i}", 1)
    assert begun(queue) == ["a0", "b0", "a1"]
    queue.end("b", 1.0)
    # Tenant a was given nothing yet, as far as is known, but has two places.
    queue.end("a", 0.5)
    assert begun(queue) == ["a2", "b1"]


def test_an_only_place_goes_to_the_tenant_that_was_given_the_fewest_seconds() -> None:
    queue = queue_of(1)
    for tenant in "ab":
        for i in range(4):
            queue.add(tenant, f"{tenant}{i}", 1)
    order = []
    for _ in range(6):
        (entry,) = begun(queue)
        order.append(entry)
        queue.end(entry[0], 2.0 if entry[0] == "a" else 0.5)
    assert order == ["a0", "b0", "b1", "b2", "b3", "a1"]


def test_a_tenant_that_was_away_has_saved_nothing_and_owes_what_it_was_given() -> None:
    queue = queue_of(1)
    queue.add("a", "a0", 1)
    assert begun(queue) == ["a0"]
    queue.add("b", "b0", 1)
    queue.end("a", 10.0)
    # Tenant a leaves, comes back, and stands behind b until b was given as much.
    queue.add("a", "a1", 1)
    assert begun(queue) == ["b0"]
    queue.add("b", "b1", 1)
    queue.end("b", 4.0)
    assert begun(queue) == ["b1"]
    queue.end("b", 7.0)
    # Tenant c comes where work begins now.
    queue.add("c", "c0", 1)
    queue.add("c", "c1", 1)
    assert begun(queue) == ["c0"]
    queue.end("c", 7.0)
    assert begun(queue) == ["a1"]


def test_the_entries_of_a_tenant_are_bounded_in_number_and_bytes() -> None:
    queue = queue_of(1)
    queue.add("a", "a", 5000)
    assert begun(queue) == ["a"]
    queue.add("a", "b", 2000)
    with pytest.raises(LimitExceeded, match=r"2000 bytes .* and this request has 1; .* 1000"):
        queue.add("a", "c", 1)
    assert queue.remove("a", "b")
    for name in "defg":
        queue.add("a", name, 250)
    with pytest.raises(LimitExceeded, match="4 requests of the tenant wait for work") as refused:
        queue.add("a", "h", 0)
    assert refused.value.retry_after == 1.0
    queue.add("b", "i", 250)


def test_a_refused_entry_and_one_that_left_hold_no_place() -> None:
    queue = queue_of(2)
    queue.add("a", "a0", 1)
    queue.add("a", "a1", 1)
    assert begun(queue) == ["a0"]
    assert queue.remove("a", "a1")
    assert not queue.remove("a", "a0")
    queue.end("a", 1.0)
    queue.add("a", "a2", 1)
    queue.add("b", "b0", 1)
    assert begun(queue) == ["a2", "b0"]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 2.0)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_every_entry_gets_a_place_and_no_tenant_waits_for_one_other_alone(
    num_places: int, work: list[tuple[str, float]], random: object
) -> None:
    queue: FairQueue[int] = FairQueue("work", num_places, QueueLimits())
    waiting = dict.fromkeys("abc", 0)
    working: list[int] = []
    served = []
    for i, (tenant, _) in enumerate(work):
        queue.add(tenant, i, 1)
        waiting[tenant] += 1
    while any(waiting.values()) or working:
        while (entry := queue.next()) is not None:
            working.append(entry)
            waiting[work[entry][0]] -= 1
        holders = {work[entry][0] for entry in working}
        assert 0 < len(working) <= num_places
        for tenant, count in waiting.items():
            # Alone, a tenant leaves a place free, or there is only one.
            if count and tenant not in holders:
                assert len(working) == num_places
                assert len(holders) > 1 or num_places == 1
        entry = working.pop(random.randrange(len(working)))  # type: ignore[attr-defined]
        queue.end(*work[entry])
        served.append(entry)
    for tenant in "abc":
        own = [entry for entry in served if work[entry][0] == tenant]
        assert sorted(own) == [i for i, (name, _) in enumerate(work) if name == tenant]
