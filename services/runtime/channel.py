"""gRPC between stages: the options of every channel and server, in one place.

Both ends ping, so that a peer that fell silent (a cable, a paused machine, a firewall that drops)
counts as gone within seconds. A peer that closes its connection is gone at once.
"""

from __future__ import annotations

import grpc

from . import cluster_key, tls
from .call_proof import StageChannel

PING_SECONDS = 3.0
"""Seconds between two pings of a connection without other traffic."""
PONG_SECONDS = 5.0
"""Seconds that the answer may take: a busy machine is slow before it is gone."""
_RECONNECT_MS = (200, 1000)
"""Least and longest pause before a peer is tried again: one that comes back is found within a
second."""
_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024))
"""Bytes between two stages that may be unread. NOTE: gRPC measures the capacity of a connection and
opens its window that far; behind a slow reader the window grows to megabytes, seconds of small
frames ahead of any new one."""
MAX_TEXT_BYTES = 64 << 20
"""Largest request and answer of a processor in bytes: more than a body, and the tokens of a prompt
in one, may have."""

Options = tuple[tuple[str, int], ...]


def open_channel(address: str, *options: tuple[str, int]) -> StageChannel:
    """Channel to a stage at host:port; it connects when it is used."""
    return StageChannel(_plain_channel(address, options), address, cluster_key.current())


def _plain_channel(address: str, options: Options) -> grpc.aio.Channel:
    first, longest = _RECONNECT_MS
    pauses = (
        ("grpc.initial_reconnect_backoff_ms", first),
        ("grpc.max_reconnect_backoff_ms", longest),
    )
    every = (*_keepalive(), *pauses, *_WINDOW, *options)
    if (certificates := tls.current()) is None:
        return grpc.aio.insecure_channel(address, options=every)
    name = (("grpc.ssl_target_name_override", certificates.name),) if certificates.name else ()
    return grpc.aio.secure_channel(
        address, tls.channel_credentials(certificates), options=(*every, *name)
    )


def server_options() -> Options:
    """Options of a stage's server. NOTE: without the last one it would take the pings of idle
    clients for an attack."""
    longest = ("grpc.max_receive_message_length", MAX_TEXT_BYTES)
    return (("grpc.so_reuseport", 0), longest, *_keepalive(), ("grpc.http2.max_ping_strikes", 0))


def _keepalive() -> Options:
    """Options for pings. NOTE: a ping times out after a minute unless its own timeout is set,
    whatever keepalive's timeout is."""
    ping = int(PING_SECONDS * 1000)
    pong = int(PONG_SECONDS * 1000)
    return (
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", pong),
        ("grpc.http2.ping_timeout_ms", pong),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
