"""The bodies of /v1/conversations."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..wire.body import Body
from .response_schema import InputItem

MAX_ADDED = 20
"""Largest number of items in one request."""
Metadata = Annotated[dict[str, str], Meta(max_length=16, description="up to 16 strings by name")]
Items = Annotated[
    list[InputItem], Meta(max_length=MAX_ADDED, description=f"up to {MAX_ADDED} items")
]


class NewConversation(Body, kw_only=True):
    """The body of POST /v1/conversations."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationChange(Body, kw_only=True):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata


class NewItems(Body, kw_only=True):
    """The body of POST /v1/conversations/{id}/items."""

    items: Items
