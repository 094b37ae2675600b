"""Bounds the connections that clients have open over REST, by what the gateway serves at once and
may open."""

from __future__ import annotations

import contextlib
import resource

import structlog
from starlette.types import Scope

from headwater.services.runtime import errors

OWN_FILES = 256, 2048
"""Fewest and most open files that are left for logs, other stages, NATS, Redis and gRPC: a quarter
in between."""
RELAYED_FILES = 3
"""Open files of a client's connection over gRPC: its own, and both ends of the one to gRPC."""
SPARE_CONNECTIONS = 64
"""Number of connections past the limit whose requests the gateway still reads. It answers those of
`WATCHED`."""
WATCHED = frozenset({"/health", "/ping", "/ready", "/load", "/metrics"})
SURPLUS = "headwater.surplus"
"""Key of a request's scope where its connection is past the limit; the limit. No server sets it."""


class TooManyConnections(errors.Unavailable):
    def __init__(self, allowed: int) -> None:
        message = (
            f"too many connections are open over REST; allowed: {allowed}, twice --max-running and "
            "--max-queued, or what the limit of open files leaves; of these, the client that has "
            "most leaves a sixteenth to others"
        )
        super().__init__(message, code="too_many_connections")


def check_surplus(scope: Scope) -> None:
    """Raises `TooManyConnections` for a request of a connection past the limit, unless it asks how
    the gateway is."""
    if SURPLUS in scope and scope["path"] not in WATCHED:
        raise TooManyConnections(scope[SURPLUS])


def connections_allowed(wanted: int) -> int:
    """Number of connections, at most `wanted`, that the process may have open. Raises its own limit
    of open files for them as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + _own_files(wanted // 3)
    soft = _raised(soft, hard, needed)
    allowed = max(1, min(wanted, soft - _own_files(soft // 4)))
    if allowed < wanted:
        remedy = f"ulimit -n {needed}, or LimitNOFILE={needed} of a service"
        sentence = (
            f"the limit of open files, {soft}, allows {allowed} connections over REST "
            f"instead of {wanted}"
        )
        structlog.get_logger().warning(sentence, remedy=remedy)
    return allowed


def relayed_connections_allowed(wanted: int, num_rest: int) -> int:
    """Number of connections over gRPC, at most `wanted`, beside `num_rest` over REST. Raises the
    process's limit of open files as `connections_allowed` does, which is to be called first. Where
    that is not enough they have half of the files that are left to the process itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    own = _own_files(num_rest // 3)
    needed = num_rest + own + RELAYED_FILES * wanted
    soft = _raised(soft, hard, needed)
    free = max(soft - num_rest - own, own // 2)
    return max(1, min(wanted, free // RELAYED_FILES))


def _raised(soft: int, hard: int, needed: int) -> int:
    """The limit of open files, raised to `needed` as far as the system lets it."""
    if soft < needed:
        with contextlib.suppress(OSError, ValueError):
            raised = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
            return max(soft, raised)
    return soft


def _own_files(wanted: int) -> int:
    least, most = OWN_FILES
    return min(max(least, wanted), most)
