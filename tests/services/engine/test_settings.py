from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headwater.services.engine.settings import EngineSettings
from headwater.services.settings import SettingError, read_settings, to_argv


def test_a_new_knob_is_a_decision() -> None:
    assert [field.name for field in dataclasses.fields(EngineSettings)] == [
        "stage_tls_cert_file", "stage_tls_key_file", "stage_tls_ca_file", "stage_tls_name",
        "cluster_token", "cluster_token_file",
        "model_folder", "served_model_name", "replica_id", "host", "port", "advertise", "nats_url", "redis_url",
        "metrics_port", "otlp_endpoint", "log_level", "executor", "device", "dtype", "load_format", "block_size",
        "num_blocks", "kv_cache_memory", "kv_swap_memory", "kv_cache_dtype", "gpu_memory_utilization", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "long_prefill_chunk", "async_depth", "decode_steps", "gemv",
        "policy", "threads", "simulated_step_seconds", "simulated_prefill_seconds", "hang_limit", "drain_limit",
    ]  # fmt: skip


def test_no_command_line_shows_a_secret() -> None:
    password = "nats://engine:hunter2@127.0.0.1:4222"
    settings = EngineSettings(executor="simulated", nats_url=password, redis_url=password, cluster_token="t" * 32)
    assert to_argv(settings) == ["--executor=simulated"]


def test_the_core_reads_the_doors_settings_from_flags() -> None:
    settings = EngineSettings(model_folder=Path("/models/a b"), num_blocks=77, drain_limit=1.5, metrics_port=-1)
    assert read_settings(EngineSettings, to_argv(settings), env={}) == settings


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--model-folder is missing; allowed: the folder of a converted model"),
        (["--model-folder=/m", "--executor=fast"], "--executor is 'fast'; allowed: single or simulated"),
        (
            ["--executor=simulated", "--load-format=lazy"],
            "--load-format is 'lazy'; allowed: auto or dummy or dummy-uniform",
        ),
        (["--executor=simulated", "--port=70000"], "--port is 70000; allowed: 0…65535"),
        (["--executor=simulated", "--drain-limit=-1"], "--drain-limit is -1.0; allowed: 0 or more seconds"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingError) as refused:
        read_settings(EngineSettings, flags, env={})
    assert str(refused.value) == sentence
