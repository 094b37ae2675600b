"""The secret that the stages of one deployment share, and the message authentication codes that they make with it.

Knows nothing about calls, the bus or tenants: each of them names a purpose, so that a code for one is none for another.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from headwater.services.owner_file import write_owner_file
from headwater.services.settings import SettingError

MIN_TOKEN_LEN = 32
MIN_MAC_LEN = 16
_ALLOWED = f"words of at least {MIN_TOKEN_LEN} characters, the one that signs first"


class ClusterKey:
    """Keys derived from the cluster's tokens. The first token signs; all of them are believed, so that they can be
    rotated while stages run."""

    def __init__(self, tokens: Sequence[str]) -> None:
        assert tokens
        self._keys = [hmac.digest(token.encode(), b"headwater cluster key", "sha256") for token in tokens]

    def sign(self, purpose: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA256 of the parts, 32 bytes."""
        return _mac(self._keys[0], purpose, parts)

    def believes(self, mac: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Compares in constant time; `mac` may be cut to 16 bytes."""
        if len(mac) < MIN_MAC_LEN:
            return False
        return any(hmac.compare_digest(mac, _mac(key, purpose, parts)[: len(mac)]) for key in self._keys)

    def is_of_first(self, mac: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Whether the token that signs now made it, and not one that is only believed."""
        return hmac.compare_digest(mac, _mac(self._keys[0], purpose, parts))


def _mac(key: bytes, purpose: bytes, parts: Sequence[bytes]) -> bytes:
    # Lengths go before the parts: no two sequences of parts are the same bytes.
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in (purpose, *parts))
    return hmac.digest(key, framed, "sha256")


def read_cluster_key(token: str, token_file: str) -> ClusterKey | None:
    """The key of tokens separated by white space, given as they are or in a file; None where neither is given.

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
    """Writes a random token, for its owner's eyes."""
    write_owner_file(path, f"{secrets.token_hex(32)}\n".encode())


_CURRENT: ContextVar[ClusterKey | None] = ContextVar("cluster_key", default=None)


def current() -> ClusterKey | None:
    """Key of the scope that this runs in; tasks have that of their starter. None: stages believe anyone."""
    return _CURRENT.get()


@contextlib.contextmanager
def using(key: ClusterKey | None) -> Iterator[None]:
    """Channels, servers and buses that are opened in this scope prove themselves, and ask for proof, by the key."""
    before = _CURRENT.set(key)
    try:
        yield
    finally:
        _CURRENT.reset(before)
