"""Groups of client addresses: they take the place of tenants for callers whose key is not read
yet."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections import Counter

KEPT = 16
"""One of `KEPT` places is reserved from the client with the most places."""
IPV6_NETWORK_BITS = 64


def peer_of(host: str) -> str:
    """Address of a client; of an IPv6 address the network, in which one client may use any
    address."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, IPV6_NETWORK_BITS), strict=False))


def peer_of_call(peer: str) -> str:
    """`peer_of` for the peer of a relayed call as gRPC names it: `unix:/tmp/a/127.0.0.1`."""
    return peer_of(urllib.parse.unquote(peer).rpartition("/")[2])


class SharedPlaces:
    """Places that clients share. The last ones are reserved from the client that has the most.
    Behind a proxy all clients have its address, and together they leave as many unused."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._num_kept = num_places // KEPT
        self._num_taken = 0
        self._taken = Counter[str]()

    def take(self, peer: str) -> None:
        self._num_taken += 1
        self._taken[peer] += 1

    def give_back(self, peer: str) -> None:
        self._num_taken -= 1
        self._taken[peer] -= 1
        if not self._taken[peer]:
            del self._taken[peer]

    def num_surplus(self, peer: str) -> int:
        """Number of places past the client's limit; a negative number counts the places that are
        left."""
        num_past = self._num_taken - self.num_places
        if num_past < -self._num_kept or not self._has_most(peer):
            return num_past
        return num_past + self._num_kept

    def has_as_many(self, peer: str, other: str) -> bool:
        """Whether a client has as many places as another one, or more."""
        return self._taken[peer] >= self._taken[other]

    def _has_most(self, peer: str) -> bool:
        """Whether a client has many places, and none has more."""
        num_taken = self._taken[peer]
        return num_taken > self._num_kept and num_taken == max(self._taken.values())
