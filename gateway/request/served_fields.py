"""Fields of a request that no engine of its model serves. Knows fields by name only."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.proto.common_pb2 import Sampling
from headwater.services.runtime.errors import UnsupportedField
from headwater.services.runtime.member import Member


def check_fields(engines: Sequence[Member], sampling: Sampling) -> None:
    """Raises `UnsupportedField` for a field that every engine of the model refuses. Without an
    engine nothing is known."""
    if not any(engine.refused_fields for engine in engines):
        return
    refused = [dict(engine.refused_fields) for engine in engines]
    for field, _ in sampling.ListFields():
        if all(field.name in each for each in refused):
            raise UnsupportedField(field.name, refused[0][field.name])
