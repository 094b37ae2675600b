"""Mutual proof of a shared secret between an engine and a host of one of its stages, before either
reads anything else. The secret is never sent: each side sends an HMAC-SHA256 of both sides' random
numbers and its own role."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from ..config import ConfigError

MAGIC = b"hwstage2"
"""First bytes of both sides: the protocol and its version."""
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
REPLY_BYTES = 1 + PROOF_BYTES
"""Length of the engine's last message: whether it believes the other side, and its own proof."""
BELIEVED = b"\1"
REFUSED = b"\0"
ENGINE = b"engine"
STAGE = b"stage"
PROOF_SECONDS = 5.0
"""Seconds in which a new connection has to prove that it knows the secret."""
MIN_SECRET_BYTES = 32
SETTING = "stage_secret_file"
_CONTEXT = b"headwater pipeline stage\0"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class ProofError(Exception):
    """The other side failed to prove the secret."""


def read_secret(path: Path) -> bytes:
    """The content of the file without white space around it. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                allowed = f"a file of mode 0600, which its owner alone may read: chmod 600 {path}"
                raise ConfigError(SETTING, str(path), allowed)
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(
            SETTING, str(path), f"a file that can be read ({error.strerror})"
        ) from None
    if len(secret) < MIN_SECRET_BYTES:
        allowed = (
            f"a file with at least {MIN_SECRET_BYTES} bytes, such as `openssl rand -hex 32` writes"
        )
        raise ConfigError(SETTING, str(path), allowed)
    return secret


def new_hello() -> bytes:
    """First message of either side."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def check_hello(hello: bytes) -> None:
    """Raises `ProofError` for the beginning of another protocol. `hello` may be the first bytes of
    a message."""
    if hello[: len(MAGIC)] != MAGIC[: len(hello)]:
        raise ProofError("speaks another protocol, or that of another version of Headwater")


def proof(secret: bytes, role: bytes, stage_hello: bytes, engine_hello: bytes) -> bytes:
    return hmac.digest(secret, _CONTEXT + role + b"\0" + stage_hello + engine_hello, "sha256")


def check_proof(
    given: bytes, secret: bytes, role: bytes, stage_hello: bytes, engine_hello: bytes
) -> None:
    """Raises `ProofError`."""
    if not hmac.compare_digest(given, proof(secret, role, stage_hello, engine_hello)):
        raise ProofError("has another secret")
