"""Addresses at which an engine and hosts of its stages meet, and the options of their sockets."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

from ..config import ConfigError

EXAMPLE = "such as 10.0.0.1:7300 or [fd00::1]:7300"
KEEPALIVE_SECONDS = 10
KEEPALIVE_PROBES = 3


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises `ConfigError` naming the setting `name`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    try:
        # As it is encoded to be resolved.
        host.encode("idna")
    except UnicodeError:
        host = ""
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(name, text, f"host:port, {EXAMPLE}")
    return host, int(port)


def listen(name: str, text: str) -> socket.socket:
    """A socket that listens at that address alone. Raises `ConfigError`."""
    host, port = parse_address(name, text)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # As it was resolved: all of a host's addresses have many spellings.
        if ip_address(str(place[0]).partition("%")[0]).is_unspecified:
            raise ConfigError(name, text, f"one address of this host, {EXAMPLE}")
        listening = socket.create_server(place, family=family)
    except OSError as error:
        # The system's own words: Python adds the address to them.
        why = (
            error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        )
        raise ConfigError(
            name, text, f"an address of this host whose port is free ({why})"
        ) from None
    listening.setblocking(False)
    return listening


def tune(connection: socket.socket) -> None:
    """Sends small messages without delay, and has the system probe a silent peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        # Not every system has all of them.
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
