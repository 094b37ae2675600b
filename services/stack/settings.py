"""Settings of `headwater up`: each flag is declared here, with its default, its help and the stages
it goes to."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from headwater.engine_core.system.usable_cores import usable_cores

from ..engine.settings import (
    NO_DRAFTS,
    PARALLEL_SIZES,
    check_memory_share,
    check_pairs,
)
from ..models.calibration import BESIDE_KINDS, CALIBRATED_KINDS
from ..models.demo_model import DEMO_NAME
from ..models.model_place import check_models
from ..models.store import default_cache_dir
from ..runtime.advertise import check_host, is_loopback
from ..runtime.hardware import default_replicas
from ..runtime.model_name import check_model_name
from ..runtime.settings import SettingError, as_flags, check_log_level, require
from .flags import (
    ENGINE,
    GATEWAY,
    PROCESSOR,
    check_choices,
    check_stages,
    default_state_dir,
    engine_flag,
    flag,
)
from .log_files import EARLIER_LOGS
from .profile import Profile
from .scaling import IDLE_SECONDS, TARGET_REQUESTS, ScaleRules, replica_bounds

LEAST = dict.fromkeys(
    ("replicas", "gateways", "processors", "output_processors", *PARALLEL_SIZES), 1
)
LEAST |= {"max_model_len": 1, "prefill_replicas": 1, "decode_replicas": 1}
LEAST |= {
    "cold_start_timeout": 0,
    "drain_limit": 0,
    "earlier_logs": 0,
    "kv_swap_memory": 0,
    "kv_disk_memory": 1,
    "kv_peer_memory": 0,
}
SPLIT = ("prefill_replicas", "decode_replicas")
TLS_FILES = ("tls_cert_file", "tls_key_file", "tls_client_ca_file")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """One deployment on this machine: what it serves, where it listens, how many of each stage."""

    model: tuple[str, ...] = flag(
        (DEMO_NAME,),
        "Demo model, Hugging Face id, model folder or .gguf file; NAME=MODEL; repeatable.",
        shown=DEMO_NAME,
    )
    replicas: int | None = flag(
        None,
        "Engines (replicas) of the model; they share the machine.",
        shown="2; on GPUs one each",
    )
    prefill_replicas: int | None = flag(None, "Engines for prefill; needs --decode-replicas.")
    decode_replicas: int | None = flag(None, "Engines for decode; needs --prefill-replicas.")
    min_replicas: int | None = flag(
        None, "Fewest engines when their number follows demand; 0 is allowed."
    )
    max_replicas: int | None = flag(None, "Most engines when their number follows demand.")
    idle_seconds: float = flag(
        IDLE_SECONDS, "Seconds after which an engine that is not needed is stopped."
    )
    target_requests: int = flag(
        TARGET_REQUESTS, "Requests an engine has at once before another one is started."
    )
    cold_start_timeout: float = flag(
        120.0, "Seconds that a request waits for a first engine to start.", GATEWAY
    )
    profile: Path | None = flag(None, "File of engine settings that `headwater bench tune` wrote.")
    host: str = flag("127.0.0.1", "Address to listen on; beyond loopback only with keys.", GATEWAY)
    port: int = flag(8000, "Port of REST; 0: any free port.")
    grpc_port: int = flag(8001, "Port of public gRPC; 0: any free port.")
    device: str = flag("auto", "auto, cpu, cuda, or an installed platform (`platform list`).")
    dtype: str = flag("auto", "auto, float32, bfloat16 or float16.")
    load_format: str = engine_flag(
        "load_format", "auto, or random weights of the model's shape: dummy, dummy-uniform."
    )
    kv_cache_dtype: str = engine_flag(
        "kv_cache_dtype", "auto, or fp8 (GPU): twice the tokens, faster, less exact."
    )
    activation_dtype: str = engine_flag(
        "activation_dtype", "With packed weights: int8 (auto on CPUs), or model (exact)."
    )
    quantization: str = engine_flag(
        "quantization", "fp8, int8 or int4: round the weights; or a checkpoint's method."
    )
    calibration: Path | None = flag(
        None, "Text that AutoRound calibrates int4 and int8 rounding with."
    )
    model_code: str = flag(
        "auto", "auto, headwater or transformers: whose modelling code computes the model."
    )
    speculation: str = engine_flag(
        "speculation",
        "auto: draft tokens where that is faster, same answers; mtp: by the model's own layer for "
        "it; or off.",
    )
    draft_model: str | None = engine_flag(
        "draft_model", "Smaller model with the same tokenizer that drafts tokens."
    )
    """Like `model`. The processes of a deployment get its folder."""
    draft_heads: Path | None = engine_flag(
        "draft_heads", "Folder of Medusa, EAGLE or EAGLE-3 heads that draft tokens."
    )
    numerics: str = engine_flag(
        "numerics", "default, or tree: equal bits on 1, 2, 4 or 8 ranks; slower."
    )
    tensor_parallel_size: int = engine_flag(
        "tensor_parallel_size", "Ranks (processes or GPUs) that divide every layer of an engine."
    )
    expert_parallel: bool = engine_flag(
        "expert_parallel", "Each of these ranks has some experts whole, not a share of every one."
    )
    pipeline_parallel_size: int = engine_flag(
        "pipeline_parallel_size", "Pipeline stages of each engine; each has some of the layers."
    )
    eviction: str = engine_flag(
        "eviction", "Cached prefixes that are evicted first: lru, value or value-wait."
    )
    kv_swap_memory: int = engine_flag(
        "kv_swap_memory", "Bytes of host memory for cached prefixes, for each engine."
    )
    kv_disk_dir: Path | None = engine_flag(
        "kv_disk_dir", "Folder for cached prefixes that memory has no room for."
    )
    kv_disk_memory: int = engine_flag(
        "kv_disk_memory", "Bytes that each engine may use in --kv-disk-dir."
    )
    kv_peer_memory: int = engine_flag(
        "kv_peer_memory", "Bytes of each engine to copy prefixes from and to others."
    )
    kv_peer_direct: str = engine_flag(
        "kv_peer_direct", "auto: engines of one host copy KV blocks directly; or off."
    )
    adapter_memory: int = engine_flag(
        "adapter_memory", "Bytes of each engine's device for adapters (LoRA); 0: none."
    )
    adapter_host_memory: int = engine_flag(
        "adapter_host_memory", "Bytes of host memory of each engine for adapters (LoRA)."
    )
    lora_modules: tuple[str, ...] = engine_flag(
        "lora_modules", "Adapter that engines serve, NAME=FOLDER; may be repeated."
    )
    resident: float | None = flag(
        None, "GB of the device that awake models have together; others sleep until asked for."
    )
    hold_weights: str = flag(
        "auto",
        "auto (weights stay on their GPU when the engine dies) or off.",
    )
    gpu_memory_utilization: float = engine_flag(
        "gpu_memory_utilization", "Share of a GPU's memory that an engine may take."
    )
    max_model_len: int | None = flag(
        None, "Most tokens of prompt and answer together.", ENGINE, PROCESSOR
    )
    served_model_name: str | None = flag(
        None, "Model name that clients send; default: the model's own."
    )
    revision: str | None = flag(None, "Branch, tag or commit on the Hugging Face Hub.")
    chat_template: Path | None = flag(
        None, "Jinja file instead of the model's own chat template.", PROCESSOR
    )
    trust_request_chat_template: bool = flag(
        False, "Take a request's own chat template: for trusted clients only.", PROCESSOR
    )
    tool_call_parser: str | None = flag(
        None, "Format of calls: auto (by the chat template), none, or a name.", PROCESSOR
    )
    reasoning_parser: str | None = flag(
        None, "Format of thoughts: auto (by the chat template), none, or a name.", PROCESSOR
    )
    generation_config: str | None = flag(
        None, "Sampling defaults: auto (the model's), none, or a file.", PROCESSOR
    )
    escape_special_tokens: bool = flag(
        False, "Read special tokens in messages and tools as plain text.", PROCESSOR
    )
    close_schemas: bool = flag(
        True, "Answers contain only the properties that their schema names.", PROCESSOR
    )
    root_path: str = flag("", "Path under which a proxy serves the gateway, as /llm.", GATEWAY)
    trust_forwarded_prefix: bool = flag(
        False, "Take that path from X-Forwarded-Prefix; behind a proxy that sets it.", GATEWAY
    )
    api_key_file: Path | None = flag(
        None, "File of `tenant key` lines; none: no keys, loopback only.", GATEWAY
    )
    admin_key_file: Path | None = flag(
        None, "File of `name key` lines: administrators' keys.", GATEWAY
    )
    tls_cert_file: Path | None = flag(None, "PEM certificate for clients, REST and gRPC.", GATEWAY)
    tls_key_file: Path | None = flag(None, "PEM private key of that certificate.", GATEWAY)
    tls_client_ca_file: Path | None = flag(
        None, "PEM authorities; clients must show a certificate of theirs.", GATEWAY
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "Web origins that may call the API (CORS); repeatable.", GATEWAY
    )
    shared_prompt: tuple[str, ...] = flag(
        (),
        "MODEL=SHA256:TENANT+TENANT: a system message whose blocks these share; repeatable.",
        GATEWAY,
    )
    tokenizer_info: bool = flag(
        False, "Answer GET /tokenizer_info (tokenizer and chat template).", GATEWAY
    )
    gateways: int = flag(1, "Gateway processes that share the ports.")
    processors: int = flag(1, "Processor processes (text to tokens).")
    output_processors: int = flag(1, "Output processor processes (tokens to text).")
    executor: str = engine_flag("executor", "single, or simulated: no model, made-up tokens.")
    nats_url: str | None = flag(None, "URL of a NATS server to use instead of the embedded one.")
    redis_url: str | None = flag(None, "URL of a Redis server to use instead of the embedded one.")
    state_dir: Path = flag(
        default_state_dir,
        "Folder for durable state, logs and the deployment's addresses.",
        shown="~/.local/state/headwater",
    )
    cache_dir: Path = flag(
        default_cache_dir,
        "Folder for downloaded and converted models.",
        shown="~/.cache/headwater",
        variable="HEADWATER_CACHE",
    )
    drain_limit: float = flag(
        5.0, "Seconds that running requests get to end after Ctrl-C.", GATEWAY
    )
    log_level: str = flag("info", "debug, info, warning or error.")
    earlier_logs: int = flag(
        EARLIER_LOGS, "Earlier logs of each process that stay, of 20 MiB at most each."
    )

    def __post_init__(self) -> None:
        check_host(self.host)
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise SettingError(name, value, f"at least {least}")
        check_models(self.model, self.served_model_name, self.revision)
        self._check_split()
        assert self.rules
        self._check_turns()
        self._check_ports()
        self._check_words()
        if self.served_model_name is not None:
            check_model_name("served_model_name", self.served_model_name)
        check_log_level(self.log_level)
        check_memory_share(self.gpu_memory_utilization)
        check_pairs(self)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise SettingError(
                "tls_key_file",
                self.tls_key_file,
                "a file, together with --tls-cert-file, or neither",
            )
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise SettingError(
                "tls_client_ca_file",
                self.tls_client_ca_file,
                "a file, together with --tls-cert-file",
            )
        for name in ("chat_template", "api_key_file", "admin_key_file", "profile", *TLS_FILES):
            path = getattr(self, name)
            require(path is None or path.is_file(), name, str(path), "an existing file")
        check_stages(self)
        if self.api_key_file is None and self.admin_key_file is None and not is_loopback(self.host):
            who = "a loopback address, unless --api-key-file or --admin-key-file says who may call"
            raise SettingError("host", self.host, who)

    def _check_turns(self) -> None:
        if self.resident is None:
            return
        require(self.resident > 0, "resident", self.resident, "more than 0 GB")
        if self.scales_by_demand or self.num_split is not None or self.rules.max_replicas > 1:
            allowed = "one engine of each model, without other numbers of replicas"
            raise SettingError("resident", self.resident, allowed)

    def _check_ports(self) -> None:
        for name in ("port", "grpc_port"):
            require(0 <= getattr(self, name) <= 65535, name, getattr(self, name), "0…65535")
        if self.port and self.port == self.grpc_port:
            # Gateways that share their ports would share this one between REST and gRPC as well.
            raise SettingError("grpc_port", self.grpc_port, "another port than --port")

    def _check_split(self) -> None:
        """Engines of both roles, in fixed numbers."""
        for name, other in (SPLIT, SPLIT[::-1]):
            value = getattr(self, name)
            if value is not None and getattr(self, other) is None:
                raise SettingError(
                    name, value, f"a number together with --{other.replace('_', '-')}"
                )
        if self.num_split is not None and (self.replicas is not None or self.scales_by_demand):
            allowed = "none beside --replicas, --min-replicas and --max-replicas"
            raise SettingError(SPLIT[0], self.prefill_replicas, allowed)

    @property
    def num_split(self) -> int | None:
        """Engines of both roles together; None where engines have no roles."""
        if self.prefill_replicas is None or self.decode_replicas is None:
            return None
        return self.prefill_replicas + self.decode_replicas

    @property
    def joins_engines(self) -> bool:
        """Whether engines copy blocks from each other."""
        return bool(self.kv_peer_memory) or self.num_split is not None

    def _check_words(self) -> None:
        check_choices(self)
        if self.calibration is not None and self.quantization not in CALIBRATED_KINDS:
            raise SettingError("calibration", str(self.calibration), BESIDE_KINDS)
        require(
            self.draft_model is None or self.speculation != "off",
            "draft_model",
            self.draft_model,
            NO_DRAFTS,
        )
        if (folder := self.draft_heads) is not None:
            require(self.speculation != "off", "draft_heads", str(folder), NO_DRAFTS)
            require(folder.is_dir(), "draft_heads", str(folder), "an existing folder")

    @property
    def rules(self) -> ScaleRules:
        """Raises `SettingError`."""
        tuned = (
            None
            if self.profile is None or not self.profile.is_file()
            else Profile.read(self.profile).replicas
        )
        usual = (
            self.replicas
            or self.num_split
            or (1 if self.resident is not None else tuned)
            or default_replicas(self.device, self.num_ranks)
        )
        least, most = replica_bounds(self.replicas, self.max_replicas, self.min_replicas, usual)
        return ScaleRules(
            min_replicas=most if least is None else least,
            max_replicas=most,
            idle_seconds=self.idle_seconds,
            target_requests=self.target_requests,
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes of the device that awake models have together; 0: models take no turns."""
        return int((self.resident or 0) * 1e9)

    @property
    def threads(self) -> int:
        """Threads of a replica on CPUs."""
        return max(1, usable_cores() // self.rules.max_replicas)

    @property
    def num_ranks(self) -> int:
        """Number of processes of one engine that compute."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def scales_by_demand(self) -> bool:
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def has_admins(self) -> bool:
        """Whether somebody may add tenants, who are kept then."""
        return self.admin_key_file is not None or "HEADWATER_ADMIN_KEY" in os.environ

    @property
    def shares_ports(self) -> bool:
        """Whether gateways listen on ports that other processes may share."""
        return self.gateways > 1 or not (self.port and self.grpc_port)

    def resolved(self) -> StackSettings:
        """The settings with absolute paths, and with the number of replicas that holds where none
        was given."""
        paths = {
            name: path.expanduser().resolve()
            for name in ("state_dir", "cache_dir", "draft_heads", "kv_disk_dir", "calibration")
            if (path := getattr(self, name)) is not None
        }
        if self.scales_by_demand or self.num_split is not None:
            return dataclasses.replace(self, **paths)
        return dataclasses.replace(self, **paths, replicas=self.rules.max_replicas)

    def flags_for(self, stage: str) -> list[str]:
        """Flags of a stage with the names and values of these settings; unset ones are left out."""
        return [
            text
            for field in dataclasses.fields(self)
            if stage in field.metadata["stages"]
            for text in as_flags(field.name, getattr(self, field.name), field.default)
        ]


STACK_VARIABLES = frozenset(
    f"HEADWATER_{field.name.upper()}" for field in dataclasses.fields(StackSettings)
)
"""Variables that speak to `headwater up`; its children get flags instead. Others, of engines say,
pass through."""
