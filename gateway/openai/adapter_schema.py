"""The body of POST /v1/adapters."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headwater.services.runtime.model_name import MAX_NAME_LEN

from ..wire.body import Body


class NewOwnAdapter(Body, kw_only=True):
    """POST /v1/adapters"""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LEN)]
    file_ids: Annotated[list[str], Meta(min_length=1, max_length=2, description="one or two ids")]
    """Files of the tenant: an archive, or `adapter_config.json` and `adapter_model.safetensors`."""
    base: str = ""
    """The served model that the adapter is for; empty: the only one."""
