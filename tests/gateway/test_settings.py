"""What the gateway can be told, and what it refuses to be told."""

from __future__ import annotations

import dataclasses

import pytest

from headwater.gateway.settings import GatewaySettings
from headwater.services.runtime.settings import SettingError, read_settings


def test_a_new_knob_is_a_decision() -> None:
    assert [field.name for field in dataclasses.fields(GatewaySettings)] == [
        "stage_tls_cert_file",
        "stage_tls_key_file",
        "stage_tls_ca_file",
        "stage_tls_name",
        "cluster_token",
        "cluster_token_file",
        "host",
        "port",
        "grpc_port",
        "reuse_port",
        "gateway_id",
        "nats_url",
        "redis_url",
        "processor",
        "output_processor",
        "replica",
        "members_file",
        "api_key_file",
        "admin_key",
        "admin_key_file",
        "tenants_file",
        "adopt_unsigned_tenants",
        "fail_open_share",
        "master_key",
        "master_key_file",
        "shared_cache",
        # Operators know which system prompts are nobody's secret.
        "shared_prompt",
        "tls_cert_file",
        "tls_key_file",
        "tls_client_ca_file",
        "allowed_origins",
        "allowed_hosts",
        # A proxy that serves several things under one name.
        "root_path",
        "trust_forwarded_prefix",
        # A remote tokenizer needs it; an operator's template may be nobody else's business.
        "adapter_dir",
        "tokenizer_info",
        "max_body_bytes",
        "max_text_bytes",
        "max_file_bytes",
        # Operators of a NATS cluster alone know how many servers it has.
        "storage_replicas",
        "storage_bytes",
        "tenant_file_bytes",
        # None: whose adapters engines hold is the operator's decision.
        "tenant_adapters",
        "tenant_adapter_bytes",
        "tenant_response_bytes",
        "batch_concurrency",
        "max_choices",
        "max_running",
        "max_queued",
        "cold_start_timeout",
        # A gateway without a supervisor cannot know whether requests start engines.
        "ready_needs_engine",
        "response_ttl",
        "sse_keep_alive",
        "slow_reader_limit",
        # A client on a bad line may take longer; where many hold sockets open, less is better.
        "slow_head_limit",
        "slow_body_limit",
        "drain_limit",
        "routing_policy",
        "log_receipts",
        "metrics_port",
        "otlp_endpoint",
        "log_level",
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_listening_past_loopback_without_keys_is_refused(host: str) -> None:
    with pytest.raises(
        SettingError, match=r"--host is '.*'; allowed: a loopback address, unless --api-key-file"
    ):
        read_settings(GatewaySettings, [f"--host={host}"], {})
    assert (
        read_settings(GatewaySettings, [f"--host={host}", "--api-key-file=keys"], {}).host == host
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_listening_on_loopback_needs_no_keys(host: str) -> None:
    assert GatewaySettings(host=host).host == host


@pytest.mark.parametrize(
    "flag",
    [
        *(
            "--port=65536",
            "--grpc-port=-1",
            "--grpc-port=8000",
            "--max-running=0",
            "--max-choices=0",
            "--max-queued=-1",
            "--drain-limit=-1",
            "--routing-policy=fastest",
        ),
        *("--allowed-origins=app.example", "--allowed-origins=https://app.example/"),
        *("--replica=engine", "--processor=[::1]", "--output-processor=host:grpc"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(flag: str) -> None:
    with pytest.raises(SettingError, match=flag.partition("=")[0]):
        read_settings(GatewaySettings, [flag], {})
