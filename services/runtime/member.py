"""Description that a process publishes of itself: stage, incarnation, address, model and load."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headwater.proto import events_pb2

from .served_model import ServedModel


class Kind(Enum):
    """Stages that announce themselves; the value is the word in subjects."""

    GATEWAY = "gateway"
    PROCESSOR = "processor"
    OUTPUT_PROCESSOR = "output_processor"
    ENGINE = "engine"


_KIND_TO_PB = {kind: events_pb2.Member.Kind.Value(f"KIND_{kind.name}") for kind in Kind}
_KIND_OF_PB = {number: kind for kind, number in _KIND_TO_PB.items()}
_SAME = ("address", "numerics_id", "draining", "leaving", "rest_url", "version", "weights")
"""Fields of a member that are the same in its message."""


AWAKE = "awake"
"""`sleep_state` of an engine whose memory is here."""
ASLEEP = "asleep"
"""`sleep_state` of an engine that has given its memory back."""


def new_epoch() -> int:
    """Random number, never 0, that identifies one run of a process without a store."""
    return secrets.randbits(64) | 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """See `headwater.v1.Load`; the fields are the same, without the incarnation."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    prefill_tps: float = 0.0
    itl_seconds: float = 0.0
    itl_seconds_per_request: float = 0.0
    draining: bool = False
    prefix_queries: int = 0
    prefix_hits: int = 0
    max_running: int = 0
    kv_seq: int = 0
    waiting_credits: Mapping[int, int] = field(default_factory=dict)
    num_generated_tokens: int = 0
    num_used_host_blocks: int = 0
    num_total_host_blocks: int = 0
    seconds_per_hit_token: float = 0.0
    seconds_per_pulled_token: float = 0.0
    role: str = ""
    num_used_disk_bytes: int = 0
    num_total_disk_bytes: int = 0
    max_chunk_tokens: int = 0
    policy: str = ""
    resident_adapters: Sequence[bytes] = ()
    tenants: Mapping[str, float] = field(default_factory=dict)
    sleep_state: str = ""
    num_releasable_bytes: int = 0
    num_released_bytes: int = 0
    sleep_seconds: float = 0.0
    wake_seconds: float = 0.0
    num_sleeps: int = 0
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    eviction_cost: float = 0.0
    num_held_bytes: int = 0

    @property
    def is_awake(self) -> bool:
        """Whether requests are computed. An engine that does not say is awake."""
        return self.sleep_state in ("", AWAKE)

    def to_pb(self, replica_id: str, epoch: int) -> events_pb2.Load:
        incarnation = events_pb2.Incarnation(replica_id=replica_id, epoch=epoch)
        fields: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(self)
        }
        return events_pb2.Load(incarnation=incarnation, **fields)

    @classmethod
    def from_pb(cls, message: events_pb2.Load) -> ReplicaLoad:
        fields = {each.name: getattr(message, each.name) for each in dataclasses.fields(cls)}
        own = {
            "waiting_credits": dict(message.waiting_credits),
            "resident_adapters": tuple(message.resident_adapters),
            "tenants": dict(message.tenants),
            "kv_bytes": dict(message.kv_bytes),
        }
        return cls(**fields | own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """See `headwater.v1.ServedAdapter`; the fields are the same."""

    name: str
    digest: bytes
    rank: int
    published_at: float = 0.0
    is_evicted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One incarnation of a process."""

    kind: Kind
    replica_id: str
    epoch: int
    address: str
    model: ServedModel | None = None
    numerics_id: str = ""
    weights: str = ""
    """Revision of an engine's weights that took the place of the model's own; empty: these."""
    draining: bool = False
    leaving: bool = False
    load: ReplicaLoad | None = field(default=None, compare=False)
    without: tuple[str, ...] = field(default=(), compare=False)
    """Names of what a gateway or an engine does without for now."""
    rest_url: str = field(default="", compare=False)
    """Base address of a gateway's REST API."""
    version: str = field(default="", compare=False)
    """Release and commit of the process, for people; empty: it does not say."""
    refused_fields: tuple[tuple[str, str], ...] = ()
    """Fields that requests of an engine may not have, each with the reason."""
    adapters: tuple[ServedAdapter, ...] = ()
    """Adapters that requests of an engine may have."""
    num_running: int | None = field(default=None, compare=False)
    """Requests that a processor or an output processor works on; None: it does not say."""

    @property
    def model_key(self) -> str:
        return self.model.key if self.model is not None else ""

    @property
    def blocks_seen(self) -> tuple[int, ...]:
        """See `ServedModel`."""
        return self.model.blocks_seen if self.model is not None else ()

    def to_pb(self) -> events_pb2.Member:
        return events_pb2.Member(
            kind=_KIND_TO_PB[self.kind],
            incarnation=events_pb2.Incarnation(replica_id=self.replica_id, epoch=self.epoch),
            model=self.model.to_pb() if self.model is not None else None,
            model_key=self.model_key,
            load=self.load.to_pb(self.replica_id, self.epoch) if self.load is not None else None,
            without=self.without,
            refused_fields=[
                events_pb2.RefusedField(name=name, why=why) for name, why in self.refused_fields
            ],
            adapters=[
                events_pb2.ServedAdapter(**dataclasses.asdict(each)) for each in self.adapters
            ],
            num_running=self.num_running,
            **{name: getattr(self, name) for name in _SAME},
        )

    @classmethod
    def from_pb(cls, message: events_pb2.Member) -> Member:
        """Member of a message. Raises `ValueError` for a kind that this version does not know."""
        if message.kind not in _KIND_OF_PB:
            raise ValueError(f"member kind {message.kind} is unknown")
        return cls(
            kind=_KIND_OF_PB[message.kind],
            replica_id=message.incarnation.replica_id,
            epoch=message.incarnation.epoch,
            model=ServedModel.from_pb(message.model) if message.HasField("model") else None,
            load=ReplicaLoad.from_pb(message.load) if message.HasField("load") else None,
            without=tuple(message.without),
            refused_fields=tuple((each.name, each.why) for each in message.refused_fields),
            adapters=tuple(
                ServedAdapter(
                    name=each.name,
                    digest=each.digest,
                    rank=each.rank,
                    published_at=each.published_at,
                    is_evicted=each.is_evicted,
                )
                for each in message.adapters
            ),
            num_running=message.num_running if message.HasField("num_running") else None,
            **{name: getattr(message, name) for name in _SAME},
        )
