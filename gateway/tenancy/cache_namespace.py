"""The root of a request's hash chain, which decides whose cached prefixes a tenant may hit. Knows
nothing about blocks."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import structlog

from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.owner_file import read_secrets
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.settings import SettingError

SHARED_KEY = b"shared"
MIN_MASTER_KEY_LEN = 16
NAMESPACE_LEN = 16
MAX_SALT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class CacheNamespaces:
    """Derives namespaces from a master key, or, where all tenants share, from a fixed word."""

    master_key: bytes | None = field(repr=False)
    """Key that namespaces are derived with; None: all tenants share cached blocks."""

    @classmethod
    def read(cls, master_key: str, master_key_file: str, *, shared: bool) -> CacheNamespaces:
        """Reads the key as given, or from a file; with neither it is random, so that this gateway's
        namespaces are its own."""
        if shared:
            return cls(None)
        if not (master_key or master_key_file):
            structlog.get_logger().info("no master key: prefixes are shared with no other gateway")
            return cls(secrets.token_bytes(32))
        key = (
            master_key.encode()
            or read_secrets("master_key_file", Path(master_key_file)).strip().encode()
        )
        if len(key) < MIN_MASTER_KEY_LEN:
            raise SettingError(
                "master_key", "***", f"at least {MIN_MASTER_KEY_LEN} bytes, given or in a file"
            )
        return cls(key)

    def of(
        self,
        tenant_id: str,
        model: ServedModel,
        *,
        lora: str = "",
        cache_salt: str = "",
        shared: bool = False,
    ) -> bytes:
        """Namespace of 16 bytes: equal for equal words, and no one can derive them from it without
        the tenant's secret. Raises `BadRequest` for a long salt.

        `shared`: the tenant shares with all others that do.
        """
        if len(cache_salt) > MAX_SALT_CHARS:
            raise BadRequest(
                "cache_salt",
                f"cache_salt has {len(cache_salt)} characters; allowed: at most {MAX_SALT_CHARS}",
            )
        master_key = None if shared else self.master_key
        if not cache_salt:
            return _unsalted(master_key, tenant_id, model, lora)
        # NOTE: not remembered by salt, which clients choose: it takes microseconds.
        return _derived(_secret(master_key, tenant_id), model, lora, "cache_salt", cache_salt)

    def of_front(self, digest: str, model: ServedModel, *, lora: str = "") -> bytes:
        """Namespace of the blocks of a system message, by its hash: one for all tenants that share
        it. No tenant has a name with a space."""
        assert self.master_key is not None, "the settings allow no front where all is shared"
        secret = _tenant_secret(self.master_key, f"shared prompt {digest}")
        return _derived(secret, model, lora, "shared_prompt", digest)


@lru_cache(maxsize=4096)
def _unsalted(master_key: bytes | None, tenant_id: str, model: ServedModel, lora: str) -> bytes:
    """Namespace of a tenant's requests without a salt. NOTE: a model and an adapter are those that
    are served, whatever clients ask for."""
    return _derived(_secret(master_key, tenant_id), model, lora, "cache_salt", "")


def _secret(master_key: bytes | None, tenant_id: str) -> bytes:
    return SHARED_KEY if master_key is None else _tenant_secret(master_key, tenant_id)


def _derived(secret: bytes, model: ServedModel, lora: str, name: str, word: str) -> bytes:
    """Namespace of a model with an adapter, and of another word, under its name."""
    words = _framed("model", f"{model.name}@{model.revision}", "lora", lora, name, word)
    words += _framed("kv_format", model.kv_format, "block_size", str(model.block_size))
    return blake2b(words, key=secret, digest_size=NAMESPACE_LEN).digest()


@lru_cache(maxsize=4096)
def _tenant_secret(master_key: bytes, tenant_id: str) -> bytes:
    """HKDF-SHA-256 (RFC 5869) of one block; the tenant is the info."""
    extracted = hmac.digest(b"headwater cache namespace", master_key, "sha256")
    return hmac.digest(extracted, tenant_id.encode() + b"\x01", "sha256")


def _framed(*texts: str) -> bytes:
    """Texts with their lengths, concatenated, so that different lists of texts have different
    bytes."""
    return b"".join(len(data).to_bytes(4, "little") + data for data in map(str.encode, texts))
