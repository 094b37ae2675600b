"""Settings of the engine service; the server hands them to the core as flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwater.engine_core.capabilities import asked_of_options, refusals_of_engine
from headwater.engine_core.config import BLOCK_SIZES, EVICTIONS, LRU
from headwater.engine_core.queue_policies import ALLOWED, DEFAULT, Policies, PolicyError
from headwater.engine_core.weights.formats import quantization as methods

from ..runtime.advertise import check_host
from ..runtime.model_name import check_model_name
from ..runtime.role import BOTH, ROLES
from ..runtime.security_settings import StageSecuritySettings
from ..runtime.settings import (
    SettingError,
    check_log_level,
    check_writable_folder,
    require,
    setting,
)
from ..runtime.speculation import DRAFTERS, MAX_DRAFT_TOKENS, OFF, SPECULATIONS

LOAD_FORMATS = ("auto", "dummy", "dummy-uniform")
KV_CACHE_DTYPES = ("auto", "fp8")
ACTIVATION_DTYPES = ("auto", "int8", "model")
QUANTIZATIONS = methods.QUANTIZATIONS
NUMERICS = ("default", "tree")
EVICTION_CHOICES = EVICTIONS
CHOICES = {
    "executor": ("single", "simulated"),
    "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "activation_dtype": ACTIVATION_DTYPES,
    "quantization": QUANTIZATIONS,
    "speculation": SPECULATIONS,
    "role": ROLES,
    "numerics": NUMERICS,
    "kv_peer_direct": ("auto", "off"),
    "peer_access": ("auto", "off"),
    "eviction": EVICTION_CHOICES,
}
_NUMBERS = ("num_blocks", "max_model_len", "long_prefill_chunk", "threads")
_BYTES = (
    *("kv_cache_memory", "kv_swap_memory", "kv_peer_memory"),
    *("adapter_memory", "adapter_host_memory"),
)
_SECONDS = ("drain_limit", "hang_limit", "simulated_step_seconds", "simulated_prefill_seconds")
NEVER_NEGATIVE = dict.fromkeys(_NUMBERS, "0 or more") | dict.fromkeys(_BYTES, "0 or more bytes")
NEVER_NEGATIVE |= dict.fromkeys(_SECONDS, "0 or more seconds")
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
MAX_INDEX_SHARDS = 64
STAGE_SECRET_FILE = (
    "file of mode 0600 with a secret of 32 bytes or more, by which an engine and "
    "stages on other hosts know each other"
)
NO_DRAFTS = "none with --speculation off, where nothing is drafted"


def check_memory_share(share: float) -> None:
    """Raises `SettingError` for what is no share of a GPU's memory."""
    require(0 < share <= 1, "gpu_memory_utilization", share, "more than 0, at most 1")


def check_pairs(settings: object) -> None:
    """Raises `SettingError` for the first pair of capabilities that cannot be combined. `settings`
    has an engine's names."""
    for refused in refusals_of_engine(asked_of_options(settings)):
        raise SettingError(*refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(StageSecuritySettings):
    """A replica of a model: computes token ids, caches prefixes and says what it caches."""

    model_folder: Path | None = setting(None, "converted model to serve")
    weights_folder: Path | None = setting(
        None, "converted model of the same shapes, whose weights are served in place of its own"
    )
    served_model_name: str = setting("", "name that clients ask for; empty: the manifest's")
    replica_id: str = setting("", "stable name of this replica; empty: host name and port")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "gRPC port; 0: any free one")
    advertise: str = setting(
        "", "host:port at which other stages reach this one; empty: where it listens"
    )
    nats_url: str = setting(
        "", "NATS server for events, load and membership; empty: none", secret=True
    )
    redis_url: str = setting("", "Redis server of the prefix index; empty: none", secret=True)
    metrics_port: int = setting(0, "port of /metrics; 0: any, -1: none")
    otlp_endpoint: str = setting(
        "", "OpenTelemetry collector that gets spans, http://host:port (gRPC); none: no spans"
    )
    log_level: str = setting("info", "debug, info, warning or error")
    executor: str = setting("single", "what computes: single, or simulated (no weights)")
    device: str = setting(
        "auto", "cpu, cuda, the name of an installed platform, or auto (the GPU where there is one)"
    )
    dtype: str = setting("auto", "float32, bfloat16, float16, or auto (the folder's)")
    load_format: str = setting(
        "auto",
        "auto (the folder's weights), dummy (random weights) or dummy-uniform (small ones, as "
        "vLLM makes them)",
    )
    block_size: int = setting(16, "tokens a KV block: 16, 32, 64 or 128")
    num_blocks: int = setting(
        0, "KV blocks of all layers; 0: as many as --kv-cache-memory or the device holds"
    )
    kv_cache_memory: int = setting(
        0, "bytes of the KV cache; 0: what the device leaves, a fixed share on a CPU"
    )
    kv_swap_memory: int = setting(
        0, "bytes of host memory for prefixes that the GPU's cache has no room for; 0: none"
    )
    kv_disk_dir: Path | None = setting(
        None,
        "folder for prefixes that memory has no room for; they survive a restart; none: no disk",
    )
    kv_disk_memory: int = setting(16 << 30, "bytes that this engine may use in --kv-disk-dir")
    kv_peer_memory: int = setting(
        0,
        "bytes of host memory to copy prefixes from and to other engines of the model; 0: no copies",
    )
    kv_peer_direct: str = setting(
        "auto",
        "auto (engines of one host copy blocks out of each other's KV caches) or off (through "
        "--kv-peer-memory alone)",
    )
    adapter_memory: int = setting(
        0, "bytes of device memory for adapters (LoRA); others wait in host memory; 0: none"
    )
    adapter_host_memory: int = setting(
        8 << 30,
        "bytes of host memory for adapters; the least recently used leave it, and are read again for "
        "the next request",
    )
    lora_modules: tuple[str, ...] = setting((), "adapters to serve, each NAME=FOLDER")
    takes_turns: bool = setting(
        False, "may sleep, so that engines of other models have its device's memory meanwhile"
    )
    kv_cache_dtype: str = setting(
        "auto", "auto (the weights' dtype) or fp8 (half the memory, faster, less exact; GPU)"
    )
    activation_dtype: str = setting(
        "auto",
        "with packed weights: int8 (auto on CPUs) or model (--dtype); on Hopper GPUs auto "
        "follows the weights",
    )
    quantization: str = setting(
        "auto",
        "auto, or how the folder's weights must be stored: the kind that they were rounded to, "
        "or the packing method",
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of a GPU's memory for weights, activations and KV cache"
    )
    max_model_len: int = setting(0, "tokens of prompt and answer together; 0: the model's")
    max_num_seqs: int = setting(256, "most requests that run at once")
    max_num_batched_tokens: int = setting(2048, "token budget of a step")
    long_prefill_chunk: int = setting(
        0, "the most prompt tokens one request gets a step; 0: the whole budget"
    )
    async_depth: int = setting(2, "steps in flight at once, 1…4")
    speculation: str = setting(
        "auto",
        "auto (drafts tokens where that is faster, with the same answers), mtp (as auto, and the "
        "layer for multi-token prediction of the model's checkpoint has to draft) or off",
    )
    drafters: tuple[str, ...] = setting(
        DRAFTERS, f"what drafts: {' and '.join(DRAFTERS)}, or one of them"
    )
    max_draft_tokens: int = setting(
        15, "most drafted tokens of a request in a step, 1…31 and fewer than --block-size"
    )
    draft_model: Path | None = setting(
        None,
        "folder of a converted smaller model with the same tokenizer, which drafts beside "
        "--drafters; none: none",
    )
    draft_heads: Path | None = setting(
        None,
        "folder of published draft heads (Medusa, EAGLE, EAGLE-3); not together with "
        "--draft-model; none: no heads",
    )
    numerics: str = setting(
        "default",
        "default, or tree: the same bits on 1, 2, 4 or 8 ranks, so that answers move between "
        "them exactly; slower",
    )
    tensor_parallel_size: int = setting(
        1,
        "ranks (processes) that divide every layer; on a CPU at most one for each core, or for "
        "each of --threads",
    )
    expert_parallel: bool = setting(
        False,
        "each of these ranks has some of the experts whole, rather than a share of every expert",
    )
    pipeline_parallel_size: int = setting(
        1, "pipeline stages, each a process with some of the layers, 1…4"
    )
    peer_access: str = setting(
        "auto",
        "auto (ranks write into each other's GPU memory, or into host memory where GPUs cannot) "
        "or off (host memory)",
    )
    stage_hosts: int = setting(
        0,
        "how many pipeline stages, the last ones, run on other hosts: each joins by `headwater "
        "serve stage`",
    )
    stage_listen: str = setting("", "host:port where the stages of other hosts join")
    stage_secret_file: Path | None = setting(None, STAGE_SECRET_FILE)
    role: str = setting(
        BOTH, "both, prefill (computes prompts and hands them over) or decode (continues them)"
    )
    policy: str = setting(
        DEFAULT,
        "order of waiting requests within a tenant's share: fair, fcfs, priority, srpt, mlfq or "
        "slo; with TIER=POLICY behind it for single tiers, as fair,1=srpt",
    )
    eviction: str = setting(
        LRU,
        "which cached blocks are evicted first: lru (the least recently used), value (those that "
        "are least likely to save time soon) or value-wait (by value; prompts wait rather than "
        "evict)",
    )
    threads: int = setting(0, "threads that compute on a CPU; 0: one for each core")
    simulated_step_seconds: float = setting(
        0.0, "seconds that a step of the simulated executor takes"
    )
    simulated_prefill_seconds: float = setting(
        0.0, "seconds that each prompt token adds to a simulated step"
    )
    simulated_draft_acceptance: float = setting(
        0.0,
        "share of a simulated draft model's tokens that are accepted; 0: no simulated draft model",
    )
    index_shards: int = setting(
        1,
        "shards of the prefix index, equal on all engines of a model, 1…64; a Redis Cluster "
        "spreads them",
    )
    hang_limit: float = setting(
        30.0,
        "seconds that a core with work may say nothing before it is restarted, at least ten of "
        "its longest steps; "
        "ten times as long while it starts; 0: no limit",
    )
    drain_limit: float = setting(30.0, "seconds that running requests get to end after SIGTERM")

    def __post_init__(self) -> None:
        check_host(self.host)
        if self.model_folder is None and self.executor != "simulated":
            raise SettingError("model_folder", None, "the folder of a converted model")
        if self.served_model_name:
            check_model_name("served_model_name", self.served_model_name)
        if self.kv_disk_dir is not None:
            check_writable_folder("kv_disk_dir", self.kv_disk_dir)
        require(0 <= self.port <= 65535, "port", self.port, "0…65535")
        require(-1 <= self.metrics_port <= 65535, "metrics_port", self.metrics_port, "-1…65535")
        for name, least in NEVER_NEGATIVE.items():
            if getattr(self, name) < 0:
                raise SettingError(name, getattr(self, name), least)
        require(
            self.block_size in BLOCK_SIZES,
            "block_size",
            self.block_size,
            " or ".join(map(str, BLOCK_SIZES)),
        )
        require(
            1 <= self.index_shards <= MAX_INDEX_SHARDS,
            "index_shards",
            self.index_shards,
            f"1…{MAX_INDEX_SHARDS}",
        )
        check_log_level(self.log_level)
        check_memory_share(self.gpu_memory_utilization)
        require(self.kv_disk_memory >= 1, "kv_disk_memory", self.kv_disk_memory, "1 or more bytes")
        for name, allowed in CHOICES.items():
            require(getattr(self, name) in allowed, name, getattr(self, name), " or ".join(allowed))
        try:
            Policies.of(self.policy)
        except PolicyError:
            raise SettingError("policy", self.policy, ALLOWED) from None
        self._check_adapters()
        self._check_ranks()
        self._check_speculation()
        check_pairs(self)

    @property
    def speculates(self) -> bool:
        return self.speculation != OFF

    def _check_adapters(self) -> None:
        for module in self.lora_modules:
            name, _, folder = module.partition("=")
            require(name and folder, "lora_modules", module, "NAME=FOLDER")
            check_model_name("lora_modules", name)
        allowed = "none without --adapter-memory"
        named = ",".join(self.lora_modules)
        require(self.adapter_memory or not named, "lora_modules", named, allowed)

    def _check_ranks(self) -> None:
        for name in PARALLEL_SIZES:
            size = getattr(self, name)
            require(size >= 1, name, size, "1 or more")
        if not 0 <= self.stage_hosts < self.pipeline_parallel_size:
            most = self.pipeline_parallel_size - 1
            allowed = (
                f"0…{most}, fewer than --pipeline-parallel-size"
                if most
                else "0 with --pipeline-parallel-size 1"
            )
            raise SettingError("stage_hosts", self.stage_hosts, allowed)
        for name in ("stage_listen", "stage_secret_file"):
            value = getattr(self, name) or None
            if (value is None) != (self.stage_hosts == 0):
                allowed = (
                    "none without --stage-hosts"
                    if value
                    else f"one, with --stage-hosts {self.stage_hosts}"
                )
                raise SettingError(name, value and str(value), allowed)

    def _check_speculation(self) -> None:
        if (
            not self.drafters
            or not set(self.drafters) <= set(DRAFTERS)
            or len(set(self.drafters)) < len(self.drafters)
        ):
            raise SettingError(
                "drafters", self.drafters, f"{' or '.join(DRAFTERS)}, each at most once"
            )
        most = min(MAX_DRAFT_TOKENS, self.block_size - 1)
        require(
            1 <= self.max_draft_tokens <= most,
            "max_draft_tokens",
            self.max_draft_tokens,
            f"1…{most}",
        )
        require(
            self.draft_model is None or self.speculates,
            "draft_model",
            str(self.draft_model),
            NO_DRAFTS,
        )
        require(
            self.draft_heads is None or self.speculates,
            "draft_heads",
            str(self.draft_heads),
            NO_DRAFTS,
        )
        if not 0 <= self.simulated_draft_acceptance <= 1:
            raise SettingError("simulated_draft_acceptance", self.simulated_draft_acceptance, "0…1")
