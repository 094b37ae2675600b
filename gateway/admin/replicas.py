"""The REST handlers of /admin/replicas: the engines of the cluster, and taking one out of
service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headwater.proto import engine_pb2
from headwater.services.runtime import errors
from headwater.services.runtime.member import Kind, Member, ReplicaLoad
from headwater.services.runtime.membership import Members
from headwater.services.runtime.role import BOTH

from ..http.http_exchange import Exchange
from ..openai.decode import decode
from ..stages.engine_call import ask_engine
from .administration import Administration

MAX_BODY_BYTES = 1024
MARGIN_SECONDS = 10.0
"""Seconds for the last reply of an engine whose limit is over."""


class Draining(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/replicas/{id}/drain"""

    limit_seconds: Annotated[
        float, msgspec.Meta(gt=0, le=3600, description="seconds, above 0 up to 3600")
    ] = 30.0
    """Seconds in which the replica's requests may end. Unfinished requests then go on at another
    replica, where possible."""


class Role(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/replicas/{id}/role"""

    role: Literal["both", "prefill", "decode"]


class ReplicaAdmin:
    def __init__(self, members: Members, administration: Administration) -> None:
        self._members = members
        self._administration = administration

    async def list_replicas(self, exchange: Exchange) -> None:
        self._administration.caller(exchange)
        replicas = sorted(self._members.of(Kind.ENGINE), key=lambda member: member.replica_id)
        await exchange.reply_json(
            {"object": "list", "data": [_shown(member) for member in replicas]}
        )

    async def drain(self, exchange: Exchange) -> None:
        """Drains a replica; answered when it is empty and about to leave. A supervisor then starts
        another one."""
        caller = self._administration.caller(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES) or b"{}", Draining)
        member = self._named(exchange)
        change = {"replica": member.replica_id, "limit_seconds": asked.limit_seconds}
        async with self._administration.recorded(caller, "drain", change):
            request = engine_pb2.DrainRequest(limit_ms=max(1, round(asked.limit_seconds * 1000)))
            patience = asked.limit_seconds + MARGIN_SECONDS
            reply = await ask_engine(member, lambda engine: engine.Drain(request, timeout=patience))
        answer = {"id": member.replica_id, "object": "replica", "status": "drained"}
        counts = {"num_finished": reply.num_finished, "num_cancelled": reply.num_cancelled}
        await exchange.reply_json(answer | counts)

    async def set_role(self, exchange: Exchange) -> None:
        """Answered when the engine has the role; routing hears of it with its next load message."""
        caller = self._administration.caller(exchange)
        asked = decode(await exchange.body(MAX_BODY_BYTES), Role)
        member = self._named(exchange)
        async with self._administration.recorded(
            caller, "role", {"replica": member.replica_id, "role": asked.role}
        ):
            request = engine_pb2.SetRoleRequest(role=asked.role)
            reply = await ask_engine(
                member, lambda engine: engine.SetRole(request, timeout=MARGIN_SECONDS)
            )
        answer = {"id": member.replica_id, "object": "replica"}
        await exchange.reply_json(answer | {"role": asked.role, "role_before": reply.before})

    def _named(self, exchange: Exchange) -> Member:
        """The engine that the path names. Raises `NotFound`."""
        replica_id = exchange.path_params["id"]
        if (member := self._members.get(Kind.ENGINE, replica_id)) is None:
            raise errors.NotFound("replica", replica_id)
        return member


def _shown(member: Member) -> dict[str, Any]:
    load = member.load or ReplicaLoad()
    model = member.model
    return {
        "id": member.replica_id,
        "object": "replica",
        # Too long for a number in JSON.
        "epoch": f"{member.epoch:016x}",
        "address": member.address,
        "model": model.name if model is not None else None,
        "revision": model.revision if model is not None else None,
        "numerics_id": member.numerics_id,
        "weights": member.weights or None,
        "status": _status(member, load),
        "role": load.role or BOTH,
        **{
            name: getattr(load, name)
            for name in ("num_running", "num_waiting", "num_used_blocks", "num_total_blocks")
        },
        "adapters": [
            {
                "name": each.name,
                "digest": each.digest.hex(),
                "is_resident": each.digest in load.resident_adapters,
                "is_evicted": each.is_evicted,
            }
            for each in member.adapters
        ],
    }


def _status(member: Member, load: ReplicaLoad) -> str:
    if member.draining or load.draining:
        return "draining"
    return "serving" if load.is_awake else load.sleep_state
