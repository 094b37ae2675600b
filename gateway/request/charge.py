"""What an output processor is told, so that it can write a request's usage record if this gateway dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.proto.output_processor_pb2 import Charge

if TYPE_CHECKING:
    from .generation import Generation


def charge_of(generation: Generation) -> Charge:
    """Beside what it counts itself."""
    grant = generation.grant
    return Charge(
        record_id=grant.request_id,
        key_id=grant.tenant.key_id,
        prompt_tokens=generation.num_prompt_tokens,
        cached_tokens=generation.cached_tokens,
        output_tokens=sum(each.num_output_tokens for each in generation.choices if each.finish_reason is not None),
        prompt_alone=not generation.is_answered,
        charged_prompt_tokens=grant.charged_prompt_tokens,
        charged_output_tokens=grant.charged_output_tokens,
    )
