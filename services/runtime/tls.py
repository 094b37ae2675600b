"""Certificates between stages: a stage's identity, and the identities that it trusts. Both sides present theirs.

Without files nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import grpc

from .settings import SettingError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTlsSettings:
    """Settings of TLS between stages: all of them or none."""

    stage_tls_cert_file: str = setting("", "PEM certificate that this stage shows to other stages; none: no TLS")
    stage_tls_key_file: str = setting("", "PEM private key of that certificate")
    stage_tls_ca_file: str = setting("", "PEM certificates of those who sign for stages")
    stage_tls_name: str = setting("", "name in the certificates of all stages; default: the address of each")

    def stage_tls(self) -> StageTls | None:
        """Certificates of the settings. Raises `SettingError` where only some are set, `OSError` for files that cannot
        be read."""
        paths = {
            "stage_tls_cert_file": self.stage_tls_cert_file,
            "stage_tls_key_file": self.stage_tls_key_file,
            "stage_tls_ca_file": self.stage_tls_ca_file,
        }
        if not any(paths.values()):
            return None
        for name, path in paths.items():
            if not path:
                raise SettingError(name, path, "a file, as the other two of certificate, key and authority are given")
        cert, key, ca = (Path(path).read_bytes() for path in paths.values())
        return StageTls(cert, key, ca, self.stage_tls_name)


@dataclass(frozen=True, slots=True, repr=False)
class StageTls:
    """Contents of the files."""

    cert: bytes
    key: bytes
    ca: bytes
    name: str

    def client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)


def own_gateway_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Client context for the gateway that the same operator runs: trusts the gateway's own certificate, whatever
    address it was made out to, and presents it to a gateway that requires one."""
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
    """Lets a stage's server listen, by the scope's certificates; returns its port. Raises `OSError`."""
    tls = current()
    return bind(server, address, tls.server() if tls is not None else None)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Binds a server; returns the port that it listens on. Raises `OSError`."""
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise OSError(f"cannot listen on {address}: it is in use, or no address of this machine") from None
