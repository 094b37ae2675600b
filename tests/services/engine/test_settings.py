from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.settings import SettingError, read_settings, to_argv


def test_a_new_knob_is_a_decision() -> None:
    assert [field.name for field in dataclasses.fields(EngineSettings)] == [
        "stage_tls_cert_file", "stage_tls_key_file", "stage_tls_ca_file", "stage_tls_name",
        "cluster_token", "cluster_token_file",
        "model_folder", "weights_folder", "served_model_name", "replica_id", "host", "port", "advertise",
        "nats_url", "redis_url",
        "metrics_port", "otlp_endpoint", "log_level", "executor", "device", "dtype", "load_format", "block_size",
        "num_blocks", "kv_cache_memory", "kv_swap_memory", "kv_disk_dir", "kv_disk_memory", "kv_peer_memory",
        "kv_peer_direct", "adapter_memory", "adapter_host_memory", "lora_modules", "takes_turns",
        "kv_cache_dtype", "activation_dtype",
        "quantization", "gpu_memory_utilization",
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "long_prefill_chunk", "async_depth",
        "speculation", "drafters", "max_draft_tokens", "draft_model", "draft_heads",
        "numerics", "tensor_parallel_size", "expert_parallel", "pipeline_parallel_size",
        "peer_access", "stage_hosts", "stage_listen", "stage_secret_file",
        "role", "policy", "eviction", "threads", "simulated_step_seconds", "simulated_prefill_seconds",
        "simulated_draft_acceptance", "index_shards", "hang_limit", "drain_limit",
    ]  # fmt: skip


def test_no_command_line_shows_a_secret() -> None:
    password = "nats://engine:hunter2@127.0.0.1:4222"
    settings = EngineSettings(
        executor="simulated", nats_url=password, redis_url=password, cluster_token="t" * 32
    )
    assert to_argv(settings) == ["--executor=simulated"]


def test_the_core_reads_the_doors_settings_from_flags() -> None:
    settings = EngineSettings(
        model_folder=Path("/models/a b"), num_blocks=77, drain_limit=1.5, metrics_port=-1
    )
    assert read_settings(EngineSettings, to_argv(settings), env={}) == settings


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--model-folder is missing; allowed: the folder of a converted model"),
        (
            ["--model-folder=/m", "--executor=fast"],
            "--executor is 'fast'; allowed: single or simulated",
        ),
        (["--model-folder=/m", "--index-shards=65"], "--index-shards is 65; allowed: 1…64"),
        (
            ["--executor=simulated", "--load-format=lazy"],
            "--load-format is 'lazy'; allowed: auto or dummy or dummy-uniform",
        ),
        (["--executor=simulated", "--port=70000"], "--port is 70000; allowed: 0…65535"),
        (
            ["--executor=simulated", "--drain-limit=-1"],
            "--drain-limit is -1.0; allowed: 0 or more seconds",
        ),
        (
            ["--executor=simulated", "--block-size=0"],
            "--block-size is 0; allowed: 16 or 32 or 64 or 128",
        ),
        (
            ["--executor=simulated", "--log-level=loud"],
            "--log-level is 'loud'; allowed: debug, info, warning or error",
        ),
        (
            ["--executor=simulated", "--max-model-len=-5"],
            "--max-model-len is -5; allowed: 0 or more",
        ),
        (["--executor=simulated", "--num-blocks=-1"], "--num-blocks is -1; allowed: 0 or more"),
        (
            ["--executor=simulated", "--kv-cache-memory=-1"],
            "--kv-cache-memory is -1; allowed: 0 or more bytes",
        ),
        (
            ["--executor=simulated", "--long-prefill-chunk=-1"],
            "--long-prefill-chunk is -1; allowed: 0 or more",
        ),
        (["--executor=simulated", "--threads=-1"], "--threads is -1; allowed: 0 or more"),
        (
            ["--executor=simulated", "--speculation=on"],
            "--speculation is 'on'; allowed: auto or mtp or off",
        ),
        (
            ["--executor=simulated", "--drafters=ngram", "--drafters=eagle"],
            "--drafters is ('ngram', 'eagle'); allowed: ngram or suffix, each at most once",
        ),
        (
            ["--executor=simulated", "--drafters=ngram", "--drafters=ngram"],
            "--drafters is ('ngram', 'ngram'); allowed: ngram or suffix, each at most once",
        ),
        (
            ["--executor=simulated", "--draft-model=/d", "--speculation=off"],
            "--draft-model is '/d'; allowed: none with --speculation off, where nothing is drafted",
        ),
        (
            ["--executor=simulated", "--draft-heads=/h", "--speculation=off"],
            "--draft-heads is '/h'; allowed: none with --speculation off, where nothing is drafted",
        ),
        (
            ["--model-folder=/m", "--draft-heads=/h", "--draft-model=/d"],
            "--draft-heads is '/h'; allowed: none with draft_model",
        ),
        (
            ["--executor=simulated", "--simulated-draft-acceptance=1.5"],
            "--simulated-draft-acceptance is 1.5; allowed: 0…1",
        ),
        (
            ["--model-folder=/m", "--pipeline-parallel-size=2", "--stage-hosts=2"],
            "--stage-hosts is 2; allowed: 0…1, fewer than --pipeline-parallel-size",
        ),
        (
            ["--model-folder=/m", "--stage-hosts=-1"],
            "--stage-hosts is -1; allowed: 0 with --pipeline-parallel-size 1",
        ),
        (
            ["--model-folder=/m", "--pipeline-parallel-size=2", "--stage-hosts=1"],
            "--stage-listen is missing; allowed: one, with --stage-hosts 1",
        ),
        (
            ["--model-folder=/m", "--pipeline-parallel-size=2", "--stage-secret-file=/s"],
            "--stage-secret-file is '/s'; allowed: none without --stage-hosts",
        ),
        (
            ["--executor=simulated", "--max-draft-tokens=0"],
            "--max-draft-tokens is 0; allowed: 1…15",
        ),
        (
            ["--executor=simulated", "--max-draft-tokens=16"],
            "--max-draft-tokens is 16; allowed: 1…15",
        ),
        (
            ["--executor=simulated", "--max-draft-tokens=32", "--block-size=64"],
            "--max-draft-tokens is 32; allowed: 1…31",
        ),
    ],
)
def test_settings_that_cannot_be_served_are_refused_by_name(
    flags: list[str], sentence: str
) -> None:
    with pytest.raises(SettingError) as refused:
        read_settings(EngineSettings, flags, env={})
    assert str(refused.value) == sentence


def test_an_engine_speculates_unless_speculation_is_off() -> None:
    usual = EngineSettings(executor="simulated")
    assert (usual.speculates, usual.drafters, usual.max_draft_tokens) == (
        True,
        ("ngram", "suffix"),
        15,
    )
    assert EngineSettings(
        executor="simulated", speculation="auto", max_draft_tokens=31, block_size=32
    ).speculates
    assert not EngineSettings(executor="simulated", speculation="off").speculates


def test_drafters_are_flags_that_repeat_or_a_list_in_the_environment() -> None:
    one = read_settings(EngineSettings, ["--executor=simulated", "--drafters=suffix"], env={})
    assert one.drafters == ("suffix",)
    assert read_settings(EngineSettings, to_argv(one), env={}) == one
    env = {
        "HEADWATER_EXECUTOR": "simulated",
        "HEADWATER_DRAFTERS": "suffix,ngram",
        "HEADWATER_MAX_DRAFT_TOKENS": "4",
    }
    reported = read_settings(EngineSettings, [], env=env)
    assert (reported.drafters, reported.max_draft_tokens) == (("suffix", "ngram"), 4)
