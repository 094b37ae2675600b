"""Pages of lists, as OpenAI's clients request them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.services.runtime.errors import BadRequest


def page_of(query: Mapping[str, str], youngest_first: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The page of items behind `after`, youngest first unless `order` says otherwise. Raises
    `BadRequest`."""
    ordered = list(youngest_first)
    if query.get("order", "desc") == "asc":
        ordered.reverse()
    elif query.get("order", "desc") != "desc":
        raise BadRequest.of("order", query["order"], "asc or desc")
    limit = query.get("limit", "20")
    if (
        not limit.isascii()
        or not limit.isdigit()
        or len(limit) > 5
        or not 1 <= int(limit) <= 10_000
    ):
        raise BadRequest.of("limit", limit, "1…10000")
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise BadRequest.of("after", after, "an id of the list")
        # Clients choose ids of items, so an id may occur twice: continuing after the last
        # occurrence guarantees an end.
        ordered = ordered[len(ids) - ids[::-1].index(after) :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
