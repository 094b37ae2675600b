"""Background responses, as gateways keep them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...tenancy.tenants import Tenant

OVER = ("completed", "incomplete", "failed", "cancelled")
"""Statuses that are final."""


class Record(msgspec.Struct, kw_only=True):
    """One background response, until it can be found among the stored responses."""

    tenant: Tenant
    priority: int
    request_id: str
    body: bytes
    """Body that the client sent, with a seed, so that every run writes the same answer."""
    is_streamed: bool
    response: dict[str, Any]
    """The response, as clients see it."""
    owner: str = ""
    """Run that computes it; an earlier run finds another's name here and stops."""
    num_errors: int = 0
    """Number of runs that ended by an unforeseen error."""

    @property
    def id(self) -> str:
        response_id: str = self.response["id"]
        return response_id

    @property
    def is_over(self) -> bool:
        return self.response["status"] in OVER

    def end(self, response: dict[str, Any]) -> None:
        self.response = response
        self.body = b""
