"""A served model's entry: fields, of which most must be equal on every replica, and its key in the
cluster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from headwater.proto import events_pb2

GENERATE = "generate"
EMBED = "embed"
CLASSIFY = "classify"
"""Tasks of models."""
CAPABILITIES = {
    GENERATE: ("completion", "embedding"),
    EMBED: ("embedding", "rerank", "score"),
    CLASSIFY: ("classify", "rerank", "score"),
}
"""Names of what clients may ask for, by task."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """See `headwater.v1.ServedModel`; the fields are the same. Without slots, for `key`."""

    name: str
    revision: str
    dtype: str
    block_size: int
    kv_format: str
    max_model_len: int
    vocab_size: int
    num_shards: int = 1
    weight_bytes: int = dataclasses.field(default=0, compare=False)
    """Size of the weights' file, for people; 0: not known. Replicas need not agree."""
    model_code: str = dataclasses.field(default="", compare=False)
    """Owner of the modelling code, for people: headwater or transformers; empty: not known.
    Replicas need not agree."""

    task: str = dataclasses.field(default="", compare=False)
    """Task of the model: generate, embed or classify; empty: not known. Replicas need not agree."""

    blocks_seen: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    """Number of blocks before a position whose pages a kind of layer needs to continue a prompt
    there, by kind; 0: all. Empty: all blocks, of one kind. Replicas need not agree."""

    @cached_property
    def key(self) -> str:
        """Key in hex, for NATS subjects and Redis keys, since names contain `.` and `/`."""
        return model_key(self.name)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Names of what clients may ask for. The hidden states of a model that generates are
        embeddings too."""
        return CAPABILITIES.get(self.task, CAPABILITIES[GENERATE])

    def mismatch(self, other: ServedModel) -> str | None:
        """The first field in which two entries of one name differ, as a sentence; None when they
        agree."""
        for field in shared_fields():
            mine = getattr(self, field.name)
            theirs = getattr(other, field.name)
            if mine != theirs:
                return (
                    f"{field.name} is {theirs!r}; the model {self.name!r} is served with {mine!r}"
                )
        return None

    def to_pb(self) -> events_pb2.ServedModel:
        return events_pb2.ServedModel(**dataclasses.asdict(self))

    @classmethod
    def from_pb(cls, message: events_pb2.ServedModel) -> ServedModel:
        values = {field.name: getattr(message, field.name) for field in dataclasses.fields(cls)}
        values["blocks_seen"] = tuple(message.blocks_seen)
        return cls(**values)


def shared_fields() -> list[dataclasses.Field[Any]]:
    """Fields that must be equal on every replica."""
    return [field for field in dataclasses.fields(ServedModel) if field.compare]


def model_key(name: str) -> str:
    """Key of the model that is served under a name. NOTE: not remembered by name: clients ask for
    names of any length."""
    return blake2b(name.encode(), digest_size=8).hexdigest()
