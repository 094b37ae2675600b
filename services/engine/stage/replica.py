"""Identity of this engine in the cluster: its incarnation, the model that it serves, the facts of
both."""

from __future__ import annotations

import os
import socket

from headwater.proto.events_pb2 import Incarnation

from ...models.manifest import ModelManifest
from ...runtime.member import Kind, Member, ReplicaLoad, ServedAdapter, new_epoch
from ...runtime.served_model import GENERATE, ServedModel
from ...runtime.version import full_version
from ..core.messages import Ready
from ..settings import EngineSettings

SIMULATED = "simulated"


class Replica:
    def __init__(self, settings: EngineSettings, ready: Ready) -> None:
        """Raises `ModelFolderError`."""
        self.replica_id = settings.replica_id or _default_id(settings.port)
        self.epoch = new_epoch()
        self.address = ""
        """Set once the server listens."""
        self.numerics_id = ready.numerics_id
        self.weights = _replaced_weights(settings)
        """Revision of the weights that took the place of the model's own; empty: these."""
        self.refused_fields = ready.refused_fields
        self.model = _served_model(settings, ready)

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(replica_id=self.replica_id, epoch=self.epoch)

    def describe(
        self,
        load: ReplicaLoad,
        without: tuple[str, ...] = (),
        adapters: tuple[ServedAdapter, ...] = (),
    ) -> Member:
        """`without`: what the engine has to go without for now; `adapters`: those that requests may
        have."""
        return Member(
            kind=Kind.ENGINE,
            replica_id=self.replica_id,
            epoch=self.epoch,
            address=self.address,
            model=self.model,
            numerics_id=self.numerics_id,
            weights=self.weights,
            draining=load.draining,
            load=load,
            without=without,
            refused_fields=self.refused_fields,
            adapters=adapters,
            version=full_version(),
        )


def _default_id(port: int) -> str:
    """The same after a restart where the port is fixed, unlike any other otherwise."""
    return f"{socket.gethostname()}:{port}" if port else f"{socket.gethostname()}-{os.getpid()}"


def _replaced_weights(settings: EngineSettings) -> str:
    folder = settings.weights_folder
    return "" if folder is None else ModelManifest.read(folder).revision


def _served_model(settings: EngineSettings, ready: Ready) -> ServedModel:
    name = settings.served_model_name or SIMULATED
    revision = SIMULATED
    task = GENERATE
    if settings.model_folder is not None:
        manifest = ModelManifest.read(settings.model_folder)
        name = settings.served_model_name or manifest.name
        revision = manifest.revision
        task = manifest.task
    return ServedModel(
        name=name,
        revision=revision,
        dtype=ready.dtype,
        block_size=ready.block_size,
        kv_format=ready.kv_format,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        num_shards=settings.index_shards,
        task=task,
        # Empty where every kind of layer needs all blocks.
        blocks_seen=ready.blocks_seen if ready.blocks_seen != (0,) else (),
    )
