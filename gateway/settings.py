"""The gateway's settings, validated once at start."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.services.runtime.advertise import check_host, is_loopback
from headwater.services.runtime.security_settings import StageSecuritySettings
from headwater.services.runtime.settings import SettingError, setting

from .storage_limits import DEFAULT_FILE_BYTES, DEFAULT_RESPONSE_BYTES, MIN_STORAGE_BYTES

MIN_CALLS = 128
BODY_BYTES_PER_SECOND = 16 * 1024
"""Past its first seconds a body may take as long as it does at this rate: a slow body holds no
place for ever."""
ROUTING_POLICIES = ("seconds", "load", "requests")
"""Names of `POLICIES` of `router/policy.py`."""
_BEFORE = {"true": "always", "false": "once"}
"""Values of `ready_needs_engine` in the release before, which knew two."""
_WORDS: dict[str, Sequence[str]] = {
    "routing_policy": ROUTING_POLICIES,
    "ready_needs_engine": ("once", "always", "never", *_BEFORE),
}
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
_ROOT_PATH = re.compile(r"(/[^/?#\s]+)+")

_POSITIVE = (
    "max_body_bytes", "max_text_bytes", "max_file_bytes", "tenant_file_bytes",
    "tenant_response_bytes", "max_choices", "max_running", "response_ttl", "sse_keep_alive",
    "slow_reader_limit", "slow_head_limit", "slow_body_limit",
)  # fmt: skip
_BOUNDS: tuple[tuple[Sequence[str], Callable[[float], bool], str], ...] = (
    (("port", "grpc_port"), lambda value: 0 <= value <= 65535, "0…65535"),
    (_POSITIVE, lambda value: value > 0, "more than 0"),
    (
        (
            *("max_queued", "cold_start_timeout", "batch_concurrency", "drain_limit"),
            *("tenant_adapters", "tenant_adapter_bytes"),
        ),
        lambda value: value >= 0,
        "at least 0",
    ),
    (("storage_bytes",), lambda value: value >= MIN_STORAGE_BYTES, f"at least {MIN_STORAGE_BYTES}"),
    (("fail_open_share", "log_receipts"), lambda value: 0 <= value <= 1, "0…1"),
)
"""Settings that are numbers, with the numbers that are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(StageSecuritySettings):
    """The gateway: OpenAI's REST API and public gRPC over processors, output processors and
    engines."""

    host: str = setting("127.0.0.1", "address to listen on; beyond loopback only with keys")
    port: int = setting(8000, "REST port; 0: any")
    grpc_port: int = setting(8001, "public gRPC port; 0: any")
    reuse_port: bool = setting(False, "let several gateways share the ports")
    gateway_id: str = setting("", "stable name among the gateways; default: a random one")
    nats_url: str = setting(
        "",
        "NATS server for membership and events; none: only stages given by --processor, "
        "--output-processor, --replica",
    )
    redis_url: str = setting(
        "",
        "Redis server of the prefix index, limits and responses; none: what this gateway "
        "knows itself",
    )
    processor: tuple[str, ...] = setting(
        (), "host:port of a processor (repeatable); a host name stands for all its addresses"
    )
    output_processor: tuple[str, ...] = setting(
        (), "host:port of an output processor, as --processor"
    )
    replica: tuple[str, ...] = setting((), "host:port of an engine, as --processor")
    members_file: str = setting(
        "",
        "file that keeps the stages heard on NATS, for a start while NATS is away; none: they "
        "are not kept",
    )
    api_key_file: str = setting(
        "", "file with one `tenant key` a line; none: one tenant, without a key"
    )
    admin_key: str = setting(
        "", "administrator's key; set it in the environment. With one, tenants are kept in NATS"
    )
    admin_key_file: str = setting("", "file of administrators' keys, one `name key` a line")
    tenants_file: str = setting(
        "",
        "file that keeps tenants and digests of their keys for a start without NATS; none: they "
        "are not kept",
    )
    adopt_unsigned_tenants: bool = setting(
        False,
        "sign records in NATS that have no signature (tenants, files, batches); use it once, "
        "after an upgrade",
    )
    fail_open_share: float = setting(
        1.0,
        "share of each limit that this gateway grants while Redis is away; 0: it refuses with 503",
    )
    master_key: str = setting(
        "",
        "secret that separates tenants' cached prefixes, equal on all gateways; set it in the "
        "environment",
    )
    master_key_file: str = setting(
        "", "file with the master key; neither: a random one, so that gateways share no prefixes"
    )
    shared_cache: bool = setting(False, "let all tenants hit one another's cached prefixes")
    shared_prompt: tuple[str, ...] = setting(
        (),
        "MODEL=SHA256:TENANT+TENANT (repeatable): tenants that share blocks of a system message",
    )
    tls_cert_file: str = setting("", "PEM certificate for clients, REST and gRPC; none: no TLS")
    tls_key_file: str = setting("", "PEM private key of that certificate")
    tls_client_ca_file: str = setting(
        "",
        "PEM certificates of authorities; with it, clients must show a certificate that one of "
        "these signed",
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "origin whose web pages may call the API (repeatable); *: any"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host name, besides loopback names, that a gateway without keys answers to "
        "(repeatable); *: any",
    )
    root_path: str = setting(
        "", "path under which a proxy serves this gateway, as /llm; also without it"
    )
    trust_forwarded_prefix: bool = setting(
        False,
        "take the path under which a proxy serves this gateway from X-Forwarded-Prefix, for "
        "links of its pages; only behind a proxy that sets the header",
    )
    adapter_dir: str = setting(
        "",
        "folder of adapters, on the engines' hosts, from which POST /v1/load_lora_adapter may "
        "load; empty: from none",
    )
    tokenizer_info: bool = setting(
        False, "answer GET /tokenizer_info with the tokenizer's configuration and the chat template"
    )
    max_body_bytes: int = setting(
        4 * 1024 * 1024, "largest body of a request, or gRPC message, in bytes"
    )
    max_text_bytes: int = setting(
        512 * 1024, "largest request of /tokenize and /detokenize, in bytes"
    )
    max_file_bytes: int = setting(100 * 1024 * 1024, "largest file of /v1/files, in bytes")
    storage_replicas: int = setting(
        1, "servers of a NATS cluster that keep each stream: 1, 3 or 5; 1 changes no stream"
    )
    storage_bytes: int = setting(
        16 * 1024 * 1024 * 1024,
        "bytes that NATS may keep in all, divided among kinds of records; less where NATS has less",
    )
    tenant_file_bytes: int = setting(
        DEFAULT_FILE_BYTES,
        "bytes of files, batches and background responses that a tenant may keep, unless it "
        "has a limit",
    )
    tenant_adapters: int = setting(
        0, "adapters that a tenant may bring, unless it has a limit; 0: none"
    )
    tenant_adapter_bytes: int = setting(
        1024 * 1024 * 1024,
        "bytes of adapters that a tenant may bring, unless it has a limit",
    )
    tenant_response_bytes: int = setting(
        DEFAULT_RESPONSE_BYTES,
        "bytes of responses and conversations that a tenant may keep, unless it has a limit",
    )
    batch_concurrency: int = setting(
        64, "lines of batches that run on this gateway at once; 0: other gateways run batches"
    )
    max_choices: int = setting(
        1024, "most choices of one request: its prompts, each times n or best_of"
    )
    max_running: int = setting(4096, "choices that run on this gateway at once")
    max_queued: int = setting(4096, "prompts that wait on this gateway at once")
    cold_start_timeout: float = setting(
        0.0,
        "seconds that a request waits for the first engine of its model to start; 0: requests do "
        "not wait",
    )
    ready_needs_engine: str = setting(
        "once",
        "when /ready answers 503 because no engine runs: once (until the first one runs), always, "
        "or never",
    )
    response_ttl: float = setting(
        86400.0, "seconds that responses and conversations are kept in Redis"
    )
    sse_keep_alive: float = setting(
        5.0, "seconds without an event after which a stream gets a comment"
    )
    slow_reader_limit: float = setting(
        30.0,
        "seconds that a client may read nothing of its answer: over gRPC at any time, over REST "
        "after the answer's end",
    )
    slow_head_limit: float = setting(
        60.0,
        "seconds for the request line and headers over REST, and for a new connection without "
        "a request",
    )
    slow_body_limit: float = setting(
        30.0,
        "seconds for the body of a request over REST, plus one for each 16 KiB, and longest "
        "pause in it; over gRPC a "
        "message has the time of the largest body",
    )
    drain_limit: float = setting(30.0, "seconds that running requests get to end after SIGTERM")
    routing_policy: str = setting(
        "seconds",
        "how a replica is chosen: seconds (waiting and computing what is not cached), "
        "load (waiting alone) or requests (fewest)",
    )
    log_receipts: float = setting(
        0.01,
        "share of requests whose routing decision is logged; those whose replica failed always are",
    )
    metrics_port: int = setting(-1, "port of /metrics for this process alone; 0: any, -1: none")
    otlp_endpoint: str = setting(
        "", "OpenTelemetry collector that gets spans, http://host:port (gRPC); none: no spans"
    )
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        check_host(self.host)
        for names, is_allowed, allowed in _BOUNDS:
            for name in names:
                if not is_allowed(getattr(self, name)):
                    raise SettingError(name, getattr(self, name), allowed)
        if self.port and self.port == self.grpc_port:
            raise SettingError("grpc_port", self.grpc_port, "another port than --port")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise SettingError(name, getattr(self, name), ", ".join(words))
        if self.storage_replicas not in (1, 3, 5):
            raise SettingError("storage_replicas", self.storage_replicas, "1, 3, 5")
        self._check_addresses()
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise SettingError(
                "tls_key_file",
                self.tls_key_file,
                "a file, together with --tls-cert-file, or neither",
            )
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise SettingError(
                "tls_client_ca_file",
                self.tls_client_ca_file,
                "a file, together with --tls-cert-file",
            )
        self._check_callers()

    @property
    def needs_engine(self) -> str:
        """`ready_needs_engine` in the words of this release."""
        return _BEFORE.get(self.ready_needs_engine, self.ready_needs_engine)

    def _check_callers(self) -> None:
        if self.keeps_tenants and not self.nats_url:
            raise SettingError(
                "nats_url", self.nats_url, "a NATS server with JetStream, where tenants are kept"
            )
        if not (self.has_keys or is_loopback(self.host)):
            allowed = (
                "a loopback address, unless --api-key-file or --admin-key-file says who may call"
            )
            raise SettingError("host", self.host, allowed)

    def _check_addresses(self) -> None:
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            allowed = "a path that begins with a slash and ends with none, as /llm"
            raise SettingError("root_path", self.root_path, allowed)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                allowed = (
                    "* or an origin as browsers send it: scheme://host or "
                    "scheme://host:port, without a path"
                )
                raise SettingError("allowed_origins", origin, allowed)
        for name in ("processor", "output_processor", "replica"):
            for address in getattr(self, name):
                if not re.fullmatch(r".+:\d{1,5}", address):
                    raise SettingError(name, address, "host:port")

    @property
    def max_calls(self) -> int:
        """Largest number of calls over gRPC, and of connections over REST, that are open at once:
        twice those that run or wait for a turn, since others are being prepared, or wait for a
        first replica."""
        return max(MIN_CALLS, 2 * (self.max_running + self.max_queued))

    @property
    def max_message_bytes(self) -> int:
        """Largest message over gRPC."""
        return max(self.max_body_bytes, self.max_text_bytes)

    @property
    def slow_message_limit(self) -> float:
        """Seconds that a message over gRPC may take. Its length is unknown until it is complete."""
        return self.slow_body_limit + self.max_message_bytes / BODY_BYTES_PER_SECOND

    @property
    def patience(self) -> dict[str, float]:
        """Arguments of an `Exchange`: the seconds that a client may be slow."""
        return {
            "slow_reader_limit": self.slow_reader_limit,
            "slow_body_limit": self.slow_body_limit,
        }

    @property
    def has_keys(self) -> bool:
        """Whether only callers with a key are answered."""
        return bool(self.api_key_file) or self.keeps_tenants

    @property
    def keeps_tenants(self) -> bool:
        return bool(self.admin_key or self.admin_key_file)
