"""How many bytes a tenant may keep: in files (NATS) and in responses and conversations (Redis)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_FILE_BYTES = 1024 * 1024 * 1024
DEFAULT_RESPONSE_BYTES = 64 * 1024 * 1024
MIN_STORAGE_BYTES = 8 * 1024 * 1024
"""Least bytes of all that NATS keeps."""
OwnLimits = Callable[[str], tuple[int | None, int | None]]


def no_own(tenant: str) -> tuple[int | None, int | None]:
    """No limits: where no tenants are kept, none has limits of its own."""
    return None, None


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Storage limits by `Tenant.key`: the tenant's own limits, or the defaults of all tenants."""

    for_files: int = DEFAULT_FILE_BYTES
    for_responses: int = DEFAULT_RESPONSE_BYTES
    own: OwnLimits = no_own

    def file_bytes(self, tenant: str) -> int:
        """Files, batches with their results, and responses in the background."""
        own, _ = self.own(tenant)
        return self.for_files if own is None else own

    def response_bytes(self, tenant: str) -> int:
        """Responses that are kept, and conversations."""
        _, own = self.own(tenant)
        return self.for_responses if own is None else own
