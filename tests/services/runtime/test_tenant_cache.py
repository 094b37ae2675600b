"""Which entries of tenants stay where there is no room for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.services.runtime.tenant_cache import TenantCache


def test_a_tenant_that_fills_the_cache_drives_out_its_own_entries() -> None:
    cache: TenantCache[str, int] = TenantCache(1000)
    cache.put("quiet", "quiet", 0, 100)
    for i in range(50):
        cache.put("flood", f"flood{i}", i, 100)
    assert cache["quiet"] == 0
    assert [i for i in range(50) if f"flood{i}" in cache] == list(range(41, 50))
    assert (len(cache), cache.num_bytes) == (10, 1000)


def test_the_least_recently_used_entry_of_a_tenant_is_evicted() -> None:
    cache: TenantCache[str, int] = TenantCache(300)
    for name in "abc":
        cache.put("t", name, 0, 100)
    assert cache["a"] == 0
    cache.put("t", "d", 0, 100)
    assert [name for name in "abcd" if name in cache] == ["a", "c", "d"]
    with pytest.raises(KeyError):
        cache["b"]


def test_an_entry_that_grows_too_large_goes_itself_and_so_does_one_beyond_all_room() -> None:
    cache: TenantCache[str, int] = TenantCache(300)
    for name in "abc":
        cache.put(name, name, 0, 100)
    cache.resize("c", 150)
    # No tenant has more than it.
    assert (sorted(name for name in "abc" if name in cache), cache.num_bytes) == (["a", "b"], 200)
    cache.resize("c", 1)
    cache.put("d", "d", 0, 301)
    assert "d" not in cache
    cache.put("a", "a", 1, 50)
    assert (cache["a"], cache.num_bytes) == (1, 150)


def test_entries_that_go_first_go_before_those_that_were_used_less_recently() -> None:
    dropped = list[str]()
    cache = TenantCache[str, str](
        300, goes_first=lambda value: value.isupper(), on_drop=dropped.append
    )
    for name in ("a", "B", "C"):
        cache.put("t", name, name, 100)
    cache.put("t", "d", "d", 150)
    assert (dropped, cache.num_bytes) == (["B", "C"], 250)
    cache.drop("a")
    cache.drop("a")
    assert dropped == ["B", "C", "a"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 400)), max_size=80)
)
def test_bytes_are_counted_and_never_exceed_the_bound(puts: list[tuple[str, int, int]]) -> None:
    cache: TenantCache[int, int] = TenantCache(1000)
    sizes: dict[int, int] = {}
    for tenant, key, num_bytes in puts:
        cache.put(tenant, key, num_bytes, num_bytes)
        sizes[key] = num_bytes
        kept = [key for key in sizes if key in cache]
        assert cache.num_bytes == sum(sizes[key] for key in kept) <= 1000
        assert all(cache[key] == sizes[key] for key in kept)
        assert len(cache) == len(kept)
