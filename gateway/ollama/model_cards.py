"""Models as Ollama's API lists and shows them. What a gateway does not know of a model, as the
memory of a GPU that it takes, is empty."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from headwater.proto.processor_pb2 import ProcessorTokenizerInfoReply
from headwater.services.runtime.served_model import ServedModel

from ..request.cluster import Cluster
from .lines import written_time

API_VERSION = "0.13.5"
"""Version of Ollama whose API is served. Clients refuse servers that are older than the version
they need."""
LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"
"""End of a model's stay in memory: the operator unloads models."""


def served_name(cluster: Cluster, name: str) -> str:
    """Name of the model that a client names, which may add the tag `latest` to it."""
    is_known = cluster.stages.processors.serves(name) or bool(cluster.catalogues.entries(name))
    return name if is_known else name.removesuffix(LATEST)


def tags(served: Iterable[tuple[ServedModel, int]]) -> dict[str, Any]:
    """Cards of models, each with the time since which it is served."""
    return {
        "models": [_card(model) | {"modified_at": written_time(since)} for model, since in served]
    }


def running(cluster: Cluster) -> dict[str, Any]:
    """Models that have a replica."""
    there = [
        model
        for model, _ in cluster.stages.processors.models().values()
        if cluster.router.has_replica(model.key)
    ]
    return {
        "models": [
            _card(model)
            | {"expires_at": NEVER, "size_vram": 0, "context_length": model.max_model_len}
            for model in there
        ]
    }


def shown(
    model: ServedModel, since: int, known: ProcessorTokenizerInfoReply, *, with_template: bool
) -> dict[str, Any]:
    """Description of one model. Its template is included if the operator allows it. `since`: time
    from which it is served, in seconds since 1970."""
    family = known.architecture
    details = _details(model) | {"family": family, "families": [family]}
    template = msgspec.json.decode(known.info_json).get("chat_template", "")
    capabilities = ["completion"]
    if known.tool_parser:
        capabilities.append("tools")
    if known.reasoning_parser:
        capabilities.append("thinking")
    return {
        "details": details,
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": model.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": written_time(since),
        "template": template if with_template else "",
    }


def _card(model: ServedModel) -> dict[str, Any]:
    identity = "\n".join((model.name, model.revision, model.dtype, model.kv_format))
    return {
        "name": model.name,
        "model": model.name,
        "size": model.weight_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": model.dtype,
    }
