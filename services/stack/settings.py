"""What `headwater up` is told, validated once; the command line writes the defaults."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from headwater.engine_core.platforms.registry import device_names, is_registered

from ..engine.settings import BESIDE_DRAFT_MODEL, KV_CACHE_DTYPES, LOAD_FORMATS, NO_DRAFTS
from ..runtime.advertise import is_loopback
from ..runtime.hardware import DTYPES
from ..runtime.settings import SettingError
from ..runtime.speculation import MODES
from .scaling import IDLE_SECONDS, TARGET_REQUESTS, ScaleRules

COLD_START_SECONDS = 120.0
CHOICES = {
    "dtype": DTYPES,
    "executor": ("single", "simulated"),
    "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "speculation": MODES,
}

LEAST = dict.fromkeys(("replicas", "gateways", "processors", "output_processors"), 1)
LEAST |= {"cold_start_timeout": 0, "kv_swap_memory": 0}
TLS_FILES = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """One line on this machine: what it serves, where it listens, how many of each stage."""

    model: str
    revision: str | None
    served_model_name: str | None
    dtype: str
    device: str
    load_format: str
    kv_cache_dtype: str
    gpu_memory_utilization: float
    max_model_len: int | None
    chat_template: Path | None
    generation_config: str | None
    profile: Path | None
    replicas: int
    gateways: int
    processors: int
    output_processors: int
    host: str
    port: int
    grpc_port: int
    api_key_file: Path | None
    admin_key_file: Path | None
    allowed_origins: tuple[str, ...]
    state_dir: Path
    cache_dir: Path
    nats_url: str | None
    redis_url: str | None
    executor: str
    drain_limit: float
    log_level: str
    min_replicas: int | None = None
    """Given: replicas come and go by demand, `replicas` are the most."""
    idle_seconds: float = IDLE_SECONDS
    target_requests: int = TARGET_REQUESTS
    cold_start_timeout: float = COLD_START_SECONDS
    escape_special_tokens: bool = False
    speculation: str = "auto"
    draft_model: str | None = None
    """As `model`; a stack is given its folder."""
    draft_heads: Path | None = None
    kv_swap_memory: int = 0
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise SettingError(name, getattr(self, name), f"at least {least}")
        assert self.rules
        for name in ("port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise SettingError(name, getattr(self, name), "0…65535")
        self._check_words()
        if not is_registered(self.device):
            raise SettingError("device", self.device, ", ".join(device_names()))
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise SettingError("tls_key_file", self.tls_key_file, "a file, together with --tls-cert-file, or neither")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise SettingError("tls_client_ca_file", self.tls_client_ca_file, "a file, together with --tls-cert-file")
        for name in ("chat_template", "api_key_file", "admin_key_file", "profile", *TLS_FILES):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise SettingError(name, str(path), "an existing file")
        if self.api_key_file is None and self.admin_key_file is None and not is_loopback(self.host):
            who = "a loopback address, unless --api-key-file or --admin-key-file says who may call"
            raise SettingError("host", self.host, who)

    def _check_words(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SettingError(name, getattr(self, name), ", ".join(allowed))
        if self.draft_model is not None and self.speculation == "off":
            raise SettingError("draft_model", self.draft_model, NO_DRAFTS)
        if self.draft_heads is not None:
            self._check_draft_heads(self.draft_heads)

    def _check_draft_heads(self, folder: Path) -> None:
        if self.speculation == "off":
            raise SettingError("draft_heads", str(folder), NO_DRAFTS)
        if self.draft_model is not None:
            raise SettingError("draft_heads", str(folder), BESIDE_DRAFT_MODEL)
        if not folder.is_dir():
            raise SettingError("draft_heads", str(folder), "an existing folder")

    @property
    def rules(self) -> ScaleRules:
        """Raises `SettingError`."""
        return ScaleRules(
            min_replicas=self.replicas if self.min_replicas is None else self.min_replicas,
            max_replicas=self.replicas,
            idle_seconds=self.idle_seconds,
            target_requests=self.target_requests,
        )

    @property
    def has_admins(self) -> bool:
        """Whether somebody may add tenants, who are kept then."""
        return self.admin_key_file is not None or "HEADWATER_ADMIN_KEY" in os.environ

    @property
    def shares_ports(self) -> bool:
        """Gateways listen where others may too: each other, and whoever keeps a port for them that nobody named."""
        return self.gateways > 1 or not (self.port and self.grpc_port)


STACK_VARIABLES = frozenset(f"HEADWATER_{field.name.upper()}" for field in dataclasses.fields(StackSettings))
"""Variables that speak to `headwater up`; its children get flags instead. Others, of engines say, pass through."""
