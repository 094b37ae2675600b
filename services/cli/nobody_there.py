"""The error of a cluster whose bus does not answer."""

from __future__ import annotations


class NobodyThere(Exception):
    """The bus could not be reached at the address; `gateway` is what a gateway says meanwhile, where one answers."""

    def __init__(self, address: str, gateway: str = "") -> None:
        super().__init__(f"no NATS server answers at {address}; {gateway or 'is the cluster up?'}")
        self.address = address
