"""Background responses, as gateways keep them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...tenancy.tenants import Tenant

OVER = ("completed", "incomplete", "failed", "cancelled")
"""Statuses that a response does not leave."""


class Record(msgspec.Struct, kw_only=True):
    """One of them, until it can be found among the responses that are kept."""

    tenant: Tenant
    priority: int
    request_id: str
    body: bytes
    """The body that the client sent, with a seed: every run writes the same."""
    is_streamed: bool
    response: dict[str, Any]
    """The response, as clients see it."""
    owner: str = ""
    """The run that computes it; an earlier one finds another's name here and stops."""

    @property
    def id(self) -> str:
        response_id: str = self.response["id"]
        return response_id

    @property
    def is_over(self) -> bool:
        return self.response["status"] in OVER

    def end(self, response: dict[str, Any]) -> None:
        self.response, self.body = response, b""
