"""The flags of every stage of a line, from the settings and from the addresses known so far. Starts
nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..runtime.hardware import least_gpu_memory, resolve_device, visible_gpus
from ..runtime.role import DECODE, PREFILL
from .access import MASTER_KEY_FILE, ServerAccess
from .flags import ENGINE, GATEWAY, PROCESSOR
from .profile import Profile
from .roles import Role
from .settings import StackSettings
from .token_file import has_unsigned_tenants

BEHIND_HOST = "127.0.0.1"
SPLIT_PEER_BYTES = 256 << 20
"""Value of `kv_peer_memory` where engines have roles and the user gave none."""
SLEEP_SWAP_BYTES = 8 << 30
"""Value of `kv_swap_memory` where models take turns on a GPU and the user gave none."""
GPU_BLOCK_SIZE = 64
"""Tokens that the kernels of a GPU read at once."""
GPU_DEFAULTS = {"block-size": GPU_BLOCK_SIZE, "max-num-seqs": 512, "max-num-batched-tokens": 2048}
"""A step of a GPU takes more requests than one of a CPU before it takes longer. A larger budget
keeps those that decode waiting without computing prompts faster."""
LARGE_GPU_BYTES = 64 << 30
LARGE_GPU_SEQS = 1024
"""Memory from which a GPU runs more requests at once by default: logits and partial results of each
take room from the KV cache."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Flags by stage; every stage behind the gateways takes a free port on loopback and says
    which."""

    settings: StackSettings
    model_folder: Path
    served_name: str
    port: int
    grpc_port: int
    servers: ServerAccess
    prefix: str = ""
    """Beginning of the names of a model's stages, where the cluster serves several."""
    weights_folder: Path | None = None
    """Model whose weights took the place of the model's own; None: these."""

    def gateway(self, idx: int, addresses: Mapping[str, Sequence[str]]) -> list[str]:
        """`addresses`: known addresses of the other stages, so that a restarted gateway finds them
        without NATS."""
        settings = self.settings
        flags = [
            f"--port={self.port}",
            f"--grpc-port={self.grpc_port}",
            f"--gateway-id={self._id('gateway', idx)}",
        ]
        flags += settings.flags_for(GATEWAY)
        flags += ["--reuse-port"] if settings.shares_ports else []
        # The first request starts an engine, and the supervisor says so only once gateways are
        # ready.
        flags += ["--ready-needs-engine=never"] if not settings.rules.min_replicas else []
        # Gateways share their port, so any of them would answer /metrics there: each has another
        # address for it.
        flags += ["--metrics-port=0"] if settings.gateways > 1 else []
        flags += [f"--tenants-file={settings.state_dir / 'tenants.json'}"]
        flags += ["--adopt-unsigned-tenants"] if has_unsigned_tenants(settings.state_dir) else []
        for kind, flag in (
            ("processor", "processor"),
            ("output-processor", "output-processor"),
            ("engine", "replica"),
        ):
            flags += [f"--{flag}={address}" for address in addresses.get(kind, ())]
        return flags + self._facts()

    def gateway_env(self) -> dict[str, str]:
        """A master key that is set already stays; else that of the state folder separates tenants'
        caches."""
        is_set = {"HEADWATER_MASTER_KEY", "HEADWATER_MASTER_KEY_FILE"} & os.environ.keys()
        own = (
            {}
            if is_set
            else {"HEADWATER_MASTER_KEY_FILE": str(self.settings.state_dir / MASTER_KEY_FILE)}
        )
        return own | self.servers.env(Role.GATEWAY)

    def processor(self, idx: int) -> list[str]:
        flags = [*self._behind(), f"--replica-id={self.replica_id('processor', idx)}"]
        flags += [
            *self._block_size(),
            *([f"--kv-format={kv}"] if (kv := self.settings.kv_cache_dtype) != "auto" else []),
        ]
        return flags + self.settings.flags_for(PROCESSOR)

    def output_processor(self, idx: int) -> list[str]:
        return [*self._behind(), f"--replica-id={self.replica_id('output-processor', idx)}"]

    def engine(self, idx: int) -> list[str]:
        settings = self.settings
        flags = [*self._behind(), f"--replica-id={self.replica_id('engine', idx)}"]
        flags += [f"--device={self.device}", *settings.flags_for(ENGINE)]
        flags += _role_flags(settings, idx)
        flags += self._turn_flags()
        flags += [f"--weights-folder={self.weights_folder}"] if self.weights_folder else []
        # A variable of the environment sets it for every engine.
        flags += [] if "HEADWATER_THREADS" in os.environ else [f"--threads={self.threads}"]
        profile = Profile.read(settings.profile) if settings.profile else Profile()
        if self.device == "cuda":
            flags += gpu_flags(
                os.environ, gpu_defaults(os.environ, profile.engine.max_num_batched_tokens)
            )
        return flags + profile.engine_flags(os.environ)

    def engine_env(self, place: int) -> dict[str, str]:
        """GPUs go to the replicas in turn, by places that all models share, and so do a CPU's
        threads."""
        servers = self.servers.env(Role.ENGINE)
        if self.device != "cuda":
            return {"OMP_NUM_THREADS": str(self.threads)} | servers
        gpus = visible_gpus()
        num_ranks = self.settings.num_ranks
        first = place % max(1, len(gpus) // num_ranks) * num_ranks
        own = list(gpus[first : first + num_ranks])
        if self.settings.joins_engines:
            # A GPU copies blocks from the GPUs that its process sees; its own ones come first.
            own += [gpu for gpu in gpus if gpu not in own]
        # Where none is known, engines see what CUDA finds: not every machine with a GPU has the
        # library that lists it.
        return ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}) | servers

    @property
    def device(self) -> str:
        return resolve_device(self.settings.device)

    @property
    def threads(self) -> int:
        return self.settings.threads

    @property
    def supervisor_id(self) -> str:
        return self._id("supervisor", 0)

    def replica_id(self, stage: str, idx: int) -> str:
        """Replica id of a stage behind the gateways."""
        return self._id(self.prefix + stage, idx)

    def _id(self, stage: str, idx: int) -> str:
        """Name of the deployment. It separates deployments that share NATS or Redis."""
        alone = self.settings.nats_url is None and self.settings.redis_url is None
        return f"{stage}-{idx}" if alone else f"{socket.gethostname()}-{os.getpid()}-{stage}-{idx}"

    def _behind(self) -> list[str]:
        model = [f"--model-folder={self.model_folder}", f"--served-model-name={self.served_name}"]
        return [f"--host={BEHIND_HOST}", "--port=0", *model, *self._facts()]

    def _turn_flags(self) -> list[str]:
        """Flags of an engine that may sleep. A GPU's blocks go to host memory meanwhile."""
        if self.settings.resident is None:
            return []
        is_kept = self.device != "cuda" or self.settings.kv_swap_memory
        return ["--takes-turns", *([] if is_kept else [f"--kv-swap-memory={SLEEP_SWAP_BYTES}"])]

    def _block_size(self) -> list[str]:
        """Tokens of a KV block, the same for processors, which hash prompts, and engines, which
        cache blocks."""
        return (
            gpu_flags(os.environ, {"block-size": GPU_BLOCK_SIZE}) if self.device == "cuda" else []
        )

    def _facts(self) -> list[str]:
        return [f"--log-level={self.settings.log_level}"]


def gpu_defaults(env: Mapping[str, str], budget: int | None = None) -> dict[str, int]:
    """Like `GPU_DEFAULTS`, with more requests at once where all GPUs are large, but no more than a
    step has tokens: the variable's number, which engines take in place of all others, or `budget`.
    An engine refuses more."""
    setting = env.get("HEADWATER_MAX_NUM_BATCHED_TOKENS", "")
    most = int(setting) if setting.isdecimal() else budget or GPU_DEFAULTS["max-num-batched-tokens"]
    is_large = least_gpu_memory() >= LARGE_GPU_BYTES
    return GPU_DEFAULTS | {
        "max-num-seqs": min(LARGE_GPU_SEQS if is_large else GPU_DEFAULTS["max-num-seqs"], most)
    }


def gpu_flags(env: Mapping[str, str], flags: Mapping[str, int]) -> list[str]:
    """GPU flags without those whose environment variable is set, which stages read themselves."""
    return [
        f"--{name}={value}"
        for name, value in flags.items()
        if f"HEADWATER_{name.replace('-', '_').upper()}" not in env
    ]


def _role_flags(settings: StackSettings, idx: int) -> list[str]:
    """Flags of an engine's role: the first engines prefill, the others decode. Decoding engines
    need access to the blocks of prefilling ones."""
    if settings.prefill_replicas is None:
        return []
    memory = [] if settings.kv_peer_memory else [f"--kv-peer-memory={SPLIT_PEER_BYTES}"]
    return [f"--role={PREFILL if idx < settings.prefill_replicas else DECODE}", *memory]
