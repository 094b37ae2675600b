"""Certificates between stages: a stage's identity, and the identities that it trusts. Both sides
present theirs.

Without files nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import grpc

from .stage_tls import StageTls, StageTlsSettings


def channel_credentials(tls: StageTls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)


def server_credentials(tls: StageTls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(tls.key, tls.cert)], tls.ca, require_client_auth=True)


def own_gateway_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Client context for the gateway that the same operator runs: trusts the gateway's own
    certificate, whatever address it was made out to, and presents it to a gateway that requires
    one."""
    context = ssl.create_default_context(cafile=str(cert_file))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_cert_chain(cert_file, key_file)
    return context


_CURRENT: ContextVar[StageTls | None] = ContextVar("stage_tls", default=None)


def current() -> StageTls | None:
    """Certificates of the current scope; tasks inherit those of their starter."""
    return _CURRENT.get()


@contextlib.contextmanager
def certificates_shown(settings: StageTlsSettings) -> Iterator[None]:
    """Scope whose channels and servers of stages use the settings' certificates."""
    token = _CURRENT.set(settings.stage_tls())
    try:
        yield
    finally:
        _CURRENT.reset(token)


def add_port(server: grpc.aio.Server, address: str) -> int:
    """Lets a stage's server listen, by the scope's certificates; returns its port. Raises
    `OSError`."""
    tls = current()
    return bind(server, address, server_credentials(tls) if tls is not None else None)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Binds a server; returns the port that it listens on. Raises `OSError`."""
    try:
        return (
            server.add_secure_port(address, credentials)
            if credentials
            else server.add_insecure_port(address)
        )
    except RuntimeError:
        raise OSError(
            f"cannot listen on {address}: it is in use, or no address of this machine"
        ) from None
