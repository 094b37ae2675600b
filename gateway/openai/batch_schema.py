"""The body of POST /v1/batches."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..wire.body import Body


class NewBatch(Body, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[str, str], Meta(description="up to 16 strings by name")] | None = None
