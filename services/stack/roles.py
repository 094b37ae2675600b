"""Users of a cluster's NATS and of its Redis: each may publish and read what its stage needs, and
no more.

Knows subjects and keys; knows nothing about passwords or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..runtime import subjects


class Role(Enum):
    """The value is the user's name in NATS and Redis."""

    GATEWAY = "gateway"
    PROCESSOR = "processor"
    OUTPUT_PROCESSOR = "output-processor"
    ENGINE = "engine"
    OPERATOR = "operator"
    """The supervisor of `headwater up`, and `headwater status`."""


@dataclass(frozen=True, slots=True)
class NatsRights:
    """Subject patterns."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_INBOXES = f"{subjects.INBOXES}.>"
_USAGE_STREAM = "headwater_usage"
NATS_RIGHTS = {
    Role.GATEWAY: NatsRights(
        publish=(
            "member.gateway.>",
            "ctl.>",
            "inflight.>",
            subjects.EVERY_DOUBT,
            "backlog.>",
            "demand.>",
            "batch.>",
            "background.>",
            f"{subjects.USAGE}.>",
            "audit.>",
            # Buckets, work queues and streams, and acknowledging what came out of them.
            "$JS.>",
            "$KV.>",
            "$O.>",
            _INBOXES,
        ),
        subscribe=(
            *(
                "member.>",
                "load.>",
                "kv.>",
                "inflight.>",
                subjects.EVERY_DOUBT,
                "catalogue.>",
                "ctl.>",
            ),
            _INBOXES,
        ),
    ),
    Role.PROCESSOR: NatsRights(publish=("member.processor.>",), subscribe=(subjects.HELLO,)),
    # An output processor writes the usage records that a dead gateway left.
    Role.OUTPUT_PROCESSOR: NatsRights(
        publish=(
            "member.output_processor.>",
            f"{subjects.USAGE}.>",
            subjects.USAGE_LEFT,
            *(f"$JS.API.STREAM.{call}.{_USAGE_STREAM}" for call in ("INFO", "CREATE", "MSG.GET")),
        ),
        subscribe=(subjects.HELLO, _INBOXES),
    ),
    Role.ENGINE: NatsRights(
        publish=("member.engine.>", "load.>", "kv.>", subjects.GONE_TENANTS),
        subscribe=(
            subjects.HELLO,
            "backlog.>",
            subjects.TENANTS_CHANGED,
            f"{subjects.ENGINE_INBOXES}.>",
        ),
    ),
    Role.OPERATOR: NatsRights(
        publish=(subjects.HELLO, "catalogue.>", _INBOXES),
        subscribe=("member.>", "load.>", "demand.>", "ctl.models.>", subjects.HELLO, _INBOXES),
    ),
}

_WRITES = "+@all -@admin -@dangerous"
VALKEY_RIGHTS = {
    # Limits, fair shares, responses and conversations; the index is read. The console shows its
    # fill.
    Role.GATEWAY: f"~* resetchannels {_WRITES} +info",
    # The index alone: neither limits nor what tenants have stored.
    Role.ENGINE: f"~slots:* ~own:* ~pfx:* ~model:* resetchannels {_WRITES}",
    Role.OPERATOR: "~* resetchannels +@read +@connection +info -@admin",
}
"""Rules of ACLs. Stages that work on text have no use for Redis."""
