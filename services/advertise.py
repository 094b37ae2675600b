"""The address under which other processes reach a server that listens on `host`."""

from __future__ import annotations

import socket

WILDCARDS = ("", "0.0.0.0", "::")


def advertised(host: str, port: int) -> str:
    """`host:port`; for a server that listens everywhere, with the address of this machine's (or pod's) own name."""
    if host in WILDCARDS:
        host = socket.gethostbyname(socket.gethostname())
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
