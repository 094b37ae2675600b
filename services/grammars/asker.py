"""The caller of a grammar's check or compilation."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Asker:
    """A caller of what tenants share: checks and compiled grammars."""

    tenant: str
    """Key by which tenants share time and room."""
    namespace: bytes
    """Cache namespace: what is remembered of a grammar is remembered within it."""

    def key_of(self, *words: bytes) -> bytes:
        """Key of words in the namespace."""
        framed = (len(word).to_bytes(8, "little") + word for word in (self.namespace, *words))
        return blake2b(b"".join(framed), digest_size=16).digest()
