"""Served models as Anthropic's clients read them, from the cards of /v1/models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from headwater.services.runtime.errors import BadRequest

MAX_LIMIT = 1000


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def page_of_models(query: Mapping[str, str], cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The page behind the model `after_id`, or the one before `before_id`. Raises `BadRequest`."""
    limit = query.get("limit", "20")
    is_whole = limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LIMIT))
    if not is_whole or not 1 <= int(limit) <= MAX_LIMIT:
        raise BadRequest.of("limit", limit, f"1…{MAX_LIMIT}")
    found = [model_info(card) for card in cards]
    if (after := query.get("after_id")) is not None:
        found = found[_place_of(found, after, "after_id") + 1 :]
    if (before := query.get("before_id")) is not None:
        found = found[: _place_of(found, before, "before_id")]
    page = found[: int(limit)] if before is None else found[-int(limit) :]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > len(page),
    }


def _place_of(models: Sequence[Mapping[str, Any]], model_id: str, name: str) -> int:
    for place, model in enumerate(models):
        if model["id"] == model_id:
            return place
    raise BadRequest.of(name, model_id, "the id of a model")
