"""Number of tokens of a prompt that nothing answers."""

from __future__ import annotations

from headwater.proto import processor_pb2

from ..tenancy.caller import Caller
from .cluster import Cluster


async def prompt_length(
    cluster: Cluster, caller: Caller, model: str, prompt: processor_pb2.Prompt
) -> int:
    """Raises `BadRequest`, `NotFound`, `Unavailable`."""
    asked = processor_pb2.ProcessorTokenizeRequest(
        model=cluster.served.target(caller.tenant, model).model,
        prompt=prompt,
        escape_special_tokens=cluster.tenants.escapes_special_tokens(caller.tenant),
        tenant=caller.tenant.key,
    )
    return len((await cluster.stages.processors.tokenize(asked)).token_ids)
