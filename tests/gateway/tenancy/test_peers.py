"""Addresses of clients, and the places that they take."""

from __future__ import annotations

import pytest

from headwater.gateway.tenancy.peers import SharedPlaces, peer_of, peer_of_call


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a:b", "a:b"),
    ],
)
def test_a_client_is_an_address_or_the_network_of_one(host: str, peer: str) -> None:
    assert peer_of(host) == peer


@pytest.mark.parametrize(
    ("named", "peer"),
    [
        ("unix:/tmp/headwater-a/10.0.0.1", "10.0.0.1"),
        ("unix:/tmp/headwater-a/::1", "::/64"),
        ("unix:/tmp/headwater-a/fe80::1%25eth0", "fe80::/64"),
    ],
)
def test_a_peer_of_a_call_is_the_same_client(named: str, peer: str) -> None:
    assert peer_of_call(named) == peer


def test_the_client_that_has_most_places_may_not_use_the_last_sixteenth() -> None:
    places = SharedPlaces(32)
    for _ in range(30):
        places.take("a")
    assert (places.num_surplus("a"), places.num_surplus("b")) == (0, -2)
    places.take("b")
    assert (places.num_surplus("a"), places.num_surplus("b")) == (1, -1)
    assert places.has_as_many("a", "b")
    assert not places.has_as_many("b", "a")
    for _ in range(29):
        places.give_back("a")
    assert (places.num_surplus("a"), places.num_surplus("b")) == (-30, -30)
