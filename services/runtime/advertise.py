"""Addresses on which servers listen, and addresses by which others reach them."""

from __future__ import annotations

import ipaddress
import socket

from .settings import require

WILDCARDS = ("", "0.0.0.0", "::")


def advertised(host: str, port: int) -> str:
    """Advertised `host:port`; for a server that listens everywhere, with the address of this
    machine's (or pod's) own name."""
    return joined(_own_address(host) if host in WILDCARDS else host, port)


def listened(host: str) -> str:
    """Address for a server to listen on: for IPv6's wildcard that of IPv4 where the system has no
    IPv6."""
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host


def _own_address(wildcard: str) -> str:
    """The machine's address, of IPv6 where a server listens on that and there is one. Raises
    `OSError`."""
    found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    wanted = socket.AF_INET6 if wildcard == "::" else socket.AF_INET
    first = min(found, key=lambda entry: entry[0] != wanted)
    return str(first[4][0])


def joined(host: str, port: int | str) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_host(host: str) -> None:
    """Raises `SettingError` for an address to listen on that is in brackets, which stand beside a
    port alone."""
    require(
        not host.startswith("["),
        "host",
        host,
        f"an address without brackets, such as {host.strip('[]')}",
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
