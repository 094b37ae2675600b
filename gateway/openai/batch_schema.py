"""The body of POST /v1/batches."""

from __future__ import annotations

from .body import Body


class NewBatch(Body, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
