"""Attributes of a request's root span, by OpenTelemetry's conventions for generative models and
HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from headwater.services.runtime.tracing import Span

from .generation import Generation

OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}
"""Operations by endpoint, but for chats and for what has no name in the conventions."""
CHATS = frozenset({"chat", "responses", "messages", "ollama"})
TENANT_HEX = 16


def request_attributes(request_id: str, tenant: str, key: bytes | None) -> Mapping[str, str]:
    """Attributes of a request as it comes; `key`: the cluster's master key."""
    return {"headwater.request_id": request_id, "headwater.tenant": hashed(tenant, key)}


def hashed(tenant: str, key: bytes | None) -> str:
    """Hash of a tenant's name. Readers of traces can tell tenants apart; without the key they
    cannot find a name by trying."""
    message = b"headwater tenant of a span\0" + tenant.encode()
    return hmac.digest(key or b"headwater", message, "sha256").hex()[:TENANT_HEX]


def describe_model(span: Span, generation: Generation) -> None:
    """Adds what one prompt of the request has come to."""
    endpoint = generation.request.endpoint
    operation = "chat" if endpoint in CHATS else OPERATIONS.get(endpoint, endpoint)
    reasons = [choice.finish_reason for choice in generation.choices if choice.finish_reason]
    span.describe(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headwater",
            "gen_ai.request.model": generation.request.model,
            "gen_ai.response.model": generation.target.model,
            "gen_ai.response.finish_reasons": reasons,
        }
    )
    span.count("gen_ai.usage.input_tokens", generation.num_prompt_tokens)
    span.count("gen_ai.usage.output_tokens", generation.num_output_tokens)
    span.count("headwater.cached_tokens", generation.cached_tokens)
