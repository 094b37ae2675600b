"""Address under which others reach a server that listens on an address."""

from __future__ import annotations

import ipaddress
import socket

WILDCARDS = ("", "0.0.0.0", "::")


def advertised(host: str, port: int) -> str:
    """Advertised `host:port`; for a server that listens everywhere, with the address of this machine's (or pod's) own
    name."""
    if host in WILDCARDS:
        host = socket.gethostbyname(socket.gethostname())
    return joined(host, port)


def joined(host: str, port: int | str) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
