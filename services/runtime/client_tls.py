"""Check of the certificates that a gateway shows to clients."""

from __future__ import annotations

import ssl
from pathlib import Path

from .settings import SettingError


def check_client_tls(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Raises `SettingError` for files without certificates, or a key that does not match: gRPC
    would only report that it cannot listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would be asked for at the terminal without a password.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError:
        allowed = "a PEM certificate whose private key, unencrypted PEM, --tls-key-file names"
        raise SettingError("tls_cert_file", str(cert), allowed) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError:
            raise SettingError("tls_client_ca_file", str(client_ca), "PEM certificates") from None
