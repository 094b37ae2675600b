"""Limit on the number of choices of one request, the same over REST and gRPC."""

from __future__ import annotations

from headwater.proto import common_pb2
from headwater.services.runtime.errors import BadRequest


def check_num_choices(
    name: str, num_prompts: int, sampling: common_pb2.Sampling, allowed: int
) -> None:
    """Raises `BadRequest` before anything is prepared. `name` is the client's word for the
    prompts."""
    if not num_prompts:
        raise BadRequest(name, f"{name} has no prompts; allowed: 1…{allowed}")
    factor = "best_of" if sampling.best_of > sampling.n else "n"
    each = max(1, sampling.n, sampling.best_of)
    if num_prompts * each <= allowed:
        return
    if num_prompts > allowed:
        raise BadRequest(
            name, f"{name} has {num_prompts} prompts; allowed: 1…{allowed}", code="too_many_choices"
        )
    per_prompt = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
    raise BadRequest(
        factor,
        f"{factor} is {each}{per_prompt}, {num_prompts * each} choices in all; allowed: "
        f"{allowed} a request",
        code="too_many_choices",
    )
