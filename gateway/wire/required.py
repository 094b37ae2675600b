"""Fields of a body that another field requires."""

from __future__ import annotations

from typing import TypeVar

from headwater.services.runtime.errors import BadRequest

FieldT = TypeVar("FieldT")


def given(param: str, value: FieldT | None, allowed: str) -> FieldT:
    """Value of a field that another field requires."""
    if value is None:
        raise missing(param, allowed)
    return value


def missing(param: str, allowed: str) -> BadRequest:
    return BadRequest(param, f"{param} is missing; allowed: {allowed}", code="missing_field")
