"""Errors of a cluster whose gateway or bus does not answer, or on whose bus no process announces
itself."""

from __future__ import annotations

import httpx

WITHOUT_ANSWER = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)
"""Errors of a request that was not answered, of which `unreached` makes a sentence."""


class BusUnreachable(Exception):
    """The bus could not be reached at the address; `gateway` is what a gateway reports about it,
    where one answers."""

    def __init__(self, address: str, gateway: str = "") -> None:
        super().__init__(f"no NATS server answers at {address}; {gateway or 'is the cluster up?'}")
        self.address = address


class NoStageHeard(Exception):
    """Raised where no process of the cluster sends anything on the bus at its address."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"no stage is heard at {address}; where stages have a token of the cluster, "
            "HEADWATER_CLUSTER_TOKEN_FILE has to name it"
        )


def unreached(url: object, failure: httpx.TransportError) -> str:
    """Sentence on a gateway to which there was no connection, or which ended it without an
    answer."""
    if "CERTIFICATE_VERIFY_FAILED" in str(failure):
        return (
            f"the certificate of {url} is not believed ({failure}); give --base-url with the "
            "name that it is made out "
            "to, and SSL_CERT_FILE where its authority is your own"
        )
    if "[SSL" in str(failure):
        return (
            f"there is no TLS at {url} ({failure}); give --base-url with http:// where the "
            "gateway has no certificate"
        )
    if not isinstance(failure, httpx.ConnectError):
        hint = "; give --base-url with https:// where the gateway has a certificate" * str(
            url
        ).startswith("http://")
        return f"{url} ended the connection without an answer ({failure}){hint}"
    return f"no server answers at {url}; start a cluster with `headwater up`, or give --base-url"
