"""Errors of a cluster whose bus does not answer, or on which nothing is said."""

from __future__ import annotations


class BusUnreachable(Exception):
    """The bus could not be reached at the address; `gateway` is what a gateway says meanwhile, where one answers."""

    def __init__(self, address: str, gateway: str = "") -> None:
        super().__init__(f"no NATS server answers at {address}; {gateway or 'is the cluster up?'}")
        self.address = address


class NoStageHeard(Exception):
    """No process of a cluster that is believed says anything on the bus at the address."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"no stage is heard at {address}; where stages have a token of the cluster, "
            "HEADWATER_CLUSTER_TOKEN_FILE has to name it"
        )
