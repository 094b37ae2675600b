"""The secret that the stages of one deployment share, and the message authentication codes that
they make with it.

Knows nothing about calls, the bus or tenants: each of them names its purpose.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from pathlib import Path

from .owner_file import write_owner_file
from .settings import SettingError

MIN_TOKEN_LEN = 32
MIN_MAC_LEN = 16
_ALLOWED = f"words of at least {MIN_TOKEN_LEN} characters, the one that signs first"


class Purpose(Enum):
    """Purpose of a code; each has its own key, so that a code for one purpose is not valid for
    another."""

    CALL = b"call"
    ANSWER = b"answer"
    BUS = b"bus"
    RECORD = b"record"
    BLOCK = b"kv block"


class ClusterKey:
    """Keys derived from the cluster's tokens. The first token signs; all of them verify, so that
    they can be rotated while stages run."""

    def __init__(self, tokens: Sequence[str]) -> None:
        assert tokens
        self._tokens = [token.encode() for token in tokens]
        self._keys: dict[Purpose, list[bytes]] = {
            purpose: self._keys_for(purpose) for purpose in Purpose
        }

    def _keys_for(self, purpose: Purpose) -> list[bytes]:
        return [
            hmac.digest(token, b"headwater cluster key: " + purpose.value, "sha256")
            for token in self._tokens
        ]

    def keys(self, purpose: Purpose) -> Sequence[bytes]:
        """Keys of 32 bytes, for a process that makes codes of one purpose and needs no token. The
        first one signs, all of them verify."""
        return self._keys[purpose]

    def sign(self, purpose: Purpose, message: bytes) -> bytes:
        """HMAC-SHA256 of the message, 32 bytes."""
        return hmac.digest(self._keys[purpose][0], message, "sha256")

    def believes(self, mac: bytes, purpose: Purpose, message: bytes) -> bool:
        """Whether a code is valid. Compares in constant time; `mac` may be cut to 16 bytes."""
        if len(mac) < MIN_MAC_LEN:
            return False
        for key in self._keys[purpose]:
            if hmac.compare_digest(mac, hmac.digest(key, message, "sha256")[: len(mac)]):
                return True
        return False

    def is_of_first(self, mac: bytes, purpose: Purpose, message: bytes) -> bool:
        """Whether the first token made the code. It signs new messages; later tokens only
        verify."""
        return hmac.compare_digest(mac, self.sign(purpose, message))


def framed(*parts: bytes) -> bytes:
    """Parts as one message. Lengths go before them: no two sequences of parts are the same
    bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def read_cluster_key(token: str, token_file: str) -> ClusterKey | None:
    """Key of tokens separated by white space, given as they are or in a file; None where neither is
    given.

    Raises `SettingError` for a token that is too short, `OSError` for a file that cannot be read.
    """
    name, text = ("cluster_token", token) if token else ("cluster_token_file", "")
    if not token and token_file:
        text = Path(token_file).read_text()
    elif not token:
        return None
    tokens = text.split()
    if not tokens or min(map(len, tokens)) < MIN_TOKEN_LEN:
        # Never the token itself: this goes to a log.
        raise SettingError(name, token_file or "too short", _ALLOWED)
    return ClusterKey(tokens)


def make_token_file(path: Path) -> None:
    """Writes a random token to a file that only its owner can read."""
    write_owner_file(path, f"{secrets.token_hex(32)}\n".encode())


_CURRENT: ContextVar[ClusterKey | None] = ContextVar("cluster_key", default=None)


def current() -> ClusterKey | None:
    """Key of the current scope; tasks inherit that of their starter. None: stages trust every
    peer."""
    return _CURRENT.get()


@contextlib.contextmanager
def using(key: ClusterKey | None) -> Iterator[None]:
    """Scope whose channels, servers and buses send and require proofs by the key."""
    before = _CURRENT.set(key)
    try:
        yield
    finally:
        _CURRENT.reset(before)
