"""GET /v1/models, POST /tokenize and /detokenize: requests that processors alone answer."""

from __future__ import annotations

from typing import Any

from headwater.proto import processor_pb2
from headwater.services.runtime.errors import BadRequest, NotFound
from headwater.services.runtime.served_model import ServedModel

from ..request.cluster import Cluster
from ..tenancy.tenants import Tenant
from .schema import DetokenizeRequest, TokenizeRequest
from .to_pb import conversation_to_pb


class TokenizerNotShown(NotFound):
    """The tokenizer is not shown. Names the setting by which operators allow it, since it contains
    the chat template."""

    def __init__(self, path: str) -> None:
        super().__init__("path", path)
        self.args = (
            f"{self}; a gateway with --tokenizer-info answers it, and tells the chat template",
        )


def list_models(cluster: Cluster, tenant: Tenant) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [*_cards(cluster, tenant).values()],
    }


def get_model(cluster: Cluster, tenant: Tenant, name: str) -> dict[str, Any]:
    """Model by name. Raises `NotFound`."""
    if (card := _cards(cluster, tenant).get(name)) is None:
        raise cluster.stages.processors.unknown(name)
    return card


def _cards(cluster: Cluster, tenant: Tenant) -> dict[str, dict[str, Any]]:
    """Cards of models and of a tenant's adapters by name. A model's name is no adapter's."""
    models = cluster.stages.processors.models()
    adapters = {
        name: _card(models[each.base][0], int(each.created_at))
        | {"id": name, "root": each.base, "parent": each.base}
        for name, each in cluster.adapters.seen_by(tenant).items()
        if each.base in models
    }
    return adapters | {
        name: _card(*served) | cluster.catalogues.turn_of(name) for name, served in models.items()
    }


def _card(model: ServedModel, since: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": since,
        "owned_by": "headwater",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "model_code": model.model_code,
        "capabilities": list(model.capabilities),
    }


async def tokenize(
    cluster: Cluster, tenant: Tenant, asked: TokenizeRequest, model: str
) -> dict[str, Any]:
    if asked.prompt is None and asked.messages is None:
        raise BadRequest(
            "prompt",
            "prompt is missing; allowed: text, or messages in its place",
            code="missing_field",
        )
    if asked.prompt is not None and asked.messages is not None:
        raise BadRequest("prompt", "prompt and messages exclude each other; allowed: exactly one")
    if asked.prompt is not None:
        prompt = processor_pb2.Prompt(
            text=asked.prompt, add_special_tokens=asked.add_special_tokens
        )
    else:
        prompt = conversation_to_pb(asked)
    wants_text = bool(asked.return_token_strs)
    reply = await cluster.stages.processors.tokenize(
        processor_pb2.ProcessorTokenizeRequest(
            model=cluster.served.target(tenant, model).model,
            prompt=prompt,
            return_token_strings=wants_text,
            escape_special_tokens=cluster.tenants.escapes_special_tokens(tenant),
            tenant=tenant.key,
        )
    )
    return {
        "count": len(reply.token_ids),
        "max_model_len": reply.max_model_len,
        "tokens": list(reply.token_ids),
        "token_strs": list(reply.token_strings) if wants_text else None,
    }


async def detokenize(
    cluster: Cluster, tenant: Tenant, asked: DetokenizeRequest, model: str
) -> dict[str, Any]:
    request = processor_pb2.ProcessorDetokenizeRequest(
        model=cluster.served.target(tenant, model).model, token_ids=asked.tokens, tenant=tenant.key
    )
    return {"prompt": (await cluster.stages.processors.detokenize(request)).text}
