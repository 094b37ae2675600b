"""Who makes a gRPC call, and whether it may begin."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from headwater.proto import inference_pb2
from headwater.services.runtime import errors

from ..request.cluster import Cluster, shutting_down
from ..tenancy.caller import MAX_PRIORITY, Caller
from ..tenancy.tenants import Identity
from . import scores
from .call_standings import CallStandings
from .messages import Asked

Context = grpc.aio.ServicerContext[Any, Any]
Working = Asked | inference_pb2.EmbedRequest | scores.Pairs
"""Messages of calls that engines work for."""
Counting = inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest


class Callers:
    """Callers of a cluster's gRPC calls."""

    def __init__(self, cluster: Cluster, max_text_bytes: int, standings: CallStandings) -> None:
        self._cluster = cluster
        self._standings = standings
        self._max_text_bytes = max_text_bytes

    def of(self, context: Context) -> Caller:
        """The caller of a call. Raises as `identified`."""
        metadata = context.invocation_metadata()
        caller = identified(metadata, self._cluster.tenants, remaining=context.time_remaining())
        return msgspec.structs.replace(caller, standing=self._standings.of_this_call())

    def admit(self, request: Working, context: Context) -> Caller:
        """The caller of a call that engines work for. Raises `Unavailable` while the gateway shuts
        down, `BadRequest`, and errors of keys and limits."""
        if self._cluster.draining:
            raise shutting_down()
        caller = self.of(context)
        if not 0 <= request.priority <= MAX_PRIORITY:
            raise errors.BadRequest.of(
                "priority", request.priority, f"a whole number, 0…{MAX_PRIORITY}"
            )
        caller = caller.with_body(request.client_request_id, request.priority)
        self._cluster.reject_early(caller)
        return self.traced(caller, request.DESCRIPTOR.name.removesuffix("Request"))

    def traced(self, caller: Caller, method: str) -> Caller:
        """The caller with a span of the call to this method."""
        caller = self._cluster.spans.begun(caller, f"Inference/{method}")
        if caller.span.is_collected:
            caller.span.describe(
                {
                    "rpc.system": "grpc",
                    "rpc.service": "headwater.v1.Inference",
                    "rpc.method": method,
                }
            )
        return caller

    async def count(self, request: Counting, context: Context) -> tuple[Caller, str]:
        """Counts a request that no engine computes; returns its caller and model. Raises
        `LimitExceeded`, `BodyTooLarge`."""
        caller = self.of(context)
        self._cluster.accounts.exhausted.reject_early(caller.tenant, caller.standing)
        if request.ByteSize() > self._max_text_bytes:
            raise errors.BodyTooLarge(self._max_text_bytes)
        model = request.model or self._cluster.stages.processors.only_model()
        await self._cluster.accounts.count(caller.tenant, caller.standing, model)
        return caller, self._cluster.served.target(caller.tenant, model).model


def identified(metadata: Any, tenants: Identity, *, remaining: float | None = None) -> Caller:
    """The caller of a call, by its metadata; `remaining` are the seconds of its deadline. Raises as
    `Caller.of`."""
    words = _words(metadata)
    for name in ("authorization", "x-api-key", "api-key"):
        if [key for key, _ in words].count(name) > 1:
            raise errors.BadRequest(name, f"{name} is given more than once; allowed: once")
    return Caller.of(dict(words), tenants, remaining=remaining)


def headers_of(metadata: Any) -> dict[str, str]:
    """A call's metadata as headers."""
    return dict(_words(metadata))


def _words(metadata: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in metadata or () if isinstance(value, str)]
