from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headwater.gateway.settings import GatewaySettings
from headwater.services.engine.settings import EngineSettings
from headwater.services.processor.__main__ import ProcessorSettings
from headwater.services.runtime.settings import SettingError, read_settings
from headwater.services.stack.access import ServerAccess
from headwater.services.stack.flags import ENGINE, GATEWAY, PROCESSOR
from headwater.services.stack.plan import StackPlan
from headwater.services.stack.profile import EngineProfile, Profile
from headwater.services.stack.settings import StackSettings
from tests.own_certificate import own_certificate


def plan(**given: Any) -> StackPlan:
    settings = StackSettings(
        **{
            "device": "cpu",
            "replicas": 1,
            "port": 0,
            "grpc_port": 0,
            "drain_limit": 1.0,
            "state_dir": Path("/state"),
        }
        | given
    )
    return StackPlan(
        settings, Path("/models/m"), "m", 8000, 8001, ServerAccess("nats://n", "redis://r")
    )


def engine_of(stack: StackPlan) -> EngineSettings:
    return read_settings(EngineSettings, stack.engine(0), env={})


def processor_of(stack: StackPlan) -> ProcessorSettings:
    return read_settings(ProcessorSettings, stack.processor(0), env={})


STAGES = {GATEWAY: GatewaySettings, PROCESSOR: ProcessorSettings, ENGINE: EngineSettings}


@pytest.fixture(autouse=True)
def _the_memory_of_gpus_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.services.stack.plan.least_gpu_memory", lambda: 0)


@pytest.mark.parametrize("stage", STAGES)
def test_every_flag_that_goes_to_a_stage_is_a_setting_of_it(stage: str) -> None:
    known = {field.name for field in dataclasses.fields(STAGES[stage])}
    passed = {
        field.name
        for field in dataclasses.fields(StackSettings)
        if stage in field.metadata["stages"]
    }
    assert passed
    assert passed - known == set()


def test_the_number_of_replicas_is_what_was_asked_for_or_what_the_machine_is_good_for() -> None:
    assert plan(replicas=3).settings.resolved().rules.max_replicas == 3
    assert plan(replicas=None).settings.resolved().replicas == 2
    by_demand = plan(replicas=None, max_replicas=4).settings.resolved()
    assert (
        by_demand.rules.min_replicas,
        by_demand.rules.max_replicas,
        by_demand.scales_by_demand,
    ) == (1, 4, True)
    assert plan(replicas=None, min_replicas=0).settings.resolved().rules.max_replicas == 2


def test_the_settings_of_a_gpu_reach_its_engine_and_who_hashes_for_it() -> None:
    stack = plan(
        device="cuda",
        load_format="dummy",
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.5,
        kv_swap_memory=7,
        kv_disk_dir=Path("/blocks"),
        kv_disk_memory=8,
    )
    engine = engine_of(stack)
    processor = processor_of(stack)
    assert (engine.device, engine.load_format, engine.kv_cache_dtype) == ("cuda", "dummy", "fp8")
    assert engine.gpu_memory_utilization == 0.5
    assert (engine.kv_swap_memory, engine_of(plan()).kv_swap_memory) == (7, 0)
    assert (engine.kv_disk_dir, engine.kv_disk_memory, engine_of(plan()).kv_disk_dir) == (
        Path("/blocks"),
        8,
        None,
    )
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (512, 2048)
    assert engine.block_size == processor.block_size == 64
    assert processor.kv_format == "fp8"


def test_engines_speculate_unless_speculation_is_off() -> None:
    assert engine_of(plan()).speculates
    assert not engine_of(plan(speculation="off")).speculates
    with pytest.raises(SettingError, match="--speculation is 'on'; allowed: auto, mtp, off"):
        plan(speculation="on")


def test_a_draft_model_is_for_the_engines_of_a_line_that_drafts() -> None:
    assert engine_of(plan(draft_model="/models/small")).draft_model == Path("/models/small")
    assert engine_of(plan()).draft_model is None
    with pytest.raises(
        SettingError, match="--draft-model is 'small'; allowed: none with --speculation off, where"
    ):
        plan(draft_model="small", speculation="off")


def test_draft_heads_are_for_the_engines_of_a_line_that_drafts_by_no_model(tmp_path: Path) -> None:
    assert engine_of(plan(draft_heads=tmp_path)).draft_heads == tmp_path
    assert engine_of(plan()).draft_heads is None
    with pytest.raises(
        SettingError, match=r"--draft-heads is .*; allowed: none with --speculation off, where"
    ):
        plan(draft_heads=tmp_path, speculation="off")
    with pytest.raises(SettingError, match=r"--draft-heads is .*; allowed: none with draft_model"):
        plan(draft_heads=tmp_path, draft_model="small")
    with pytest.raises(
        SettingError, match="--draft-heads is '/no/heads'; allowed: an existing folder"
    ):
        plan(draft_heads=Path("/no/heads"))


def test_special_tokens_are_text_to_processors_where_the_flag_is_set() -> None:
    assert processor_of(plan(escape_special_tokens=True)).escape_special_tokens
    assert not processor_of(plan()).escape_special_tokens


def test_objects_of_schemas_are_closed_unless_the_flag_is_off() -> None:
    assert processor_of(plan()).close_schemas
    assert not processor_of(plan(close_schemas=False)).close_schemas


def test_on_a_cpu_an_engine_keeps_its_own_sizes() -> None:
    assert (
        engine_of(plan()).block_size
        == processor_of(plan()).block_size
        == EngineSettings(executor="simulated").block_size
    )


def test_a_variable_says_more_than_what_suits_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_BLOCK_SIZE", "32")
    stack = plan(device="cuda")
    # The stages read the variable by themselves.
    assert not [
        flag for flag in stack.engine(0) + stack.processor(0) if flag.startswith("--block-size")
    ]
    assert engine_of(stack).max_num_seqs == 512


@pytest.mark.parametrize(("gib", "most"), [(0, 512), (24, 512), (80, 1024)])
def test_a_large_gpu_runs_more_requests_at_once(
    gib: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.services.stack.plan.least_gpu_memory", lambda: gib << 30)
    assert engine_of(plan(device="cuda")).max_num_seqs == most


def test_a_gpu_runs_no_more_requests_than_a_step_has_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headwater.services.stack.plan.least_gpu_memory", lambda: 80 << 30)
    monkeypatch.setenv("HEADWATER_MAX_NUM_BATCHED_TOKENS", "512")
    assert engine_of(plan(device="cuda")).max_num_seqs == 512
    monkeypatch.setenv("HEADWATER_MAX_NUM_BATCHED_TOKENS", "8192")
    assert engine_of(plan(device="cuda")).max_num_seqs == 1024
    monkeypatch.delenv("HEADWATER_MAX_NUM_BATCHED_TOKENS")
    profile = tmp_path / "profile.json"
    Profile(engine=EngineProfile(max_num_batched_tokens=256)).write(profile)
    assert engine_of(plan(device="cuda", profile=profile)).max_num_seqs == 256


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_format", "none"),
        ("kv_cache_dtype", "int4"),
        ("activation_dtype", "int4"),
        ("quantization", "int3"),
        ("device", "tpu"),
    ],
)
def test_a_word_that_is_no_setting_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=name.replace("_", "-")):
        plan(**{name: value})


def test_certificates_for_clients_and_the_file_of_tenants_reach_the_gateway(tmp_path: Path) -> None:
    cert, key = own_certificate(tmp_path, days=2)
    gateway = read_settings(
        GatewaySettings, plan(tls_cert_file=cert, tls_key_file=key).gateway(0, {}), env={}
    )
    assert (gateway.tls_cert_file, gateway.tls_key_file, gateway.tls_client_ca_file) == (
        str(cert),
        str(key),
        "",
    )
    assert gateway.tenants_file == "/state/tenants.json"
    with pytest.raises(SettingError, match="--tls-key-file"):
        plan(tls_cert_file=cert)


def test_ranks_reach_every_engine_and_divide_gpus_and_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        engine_of(plan(tensor_parallel_size=3)).tensor_parallel_size,
        engine_of(plan()).tensor_parallel_size,
    ) == (
        3,
        1,
    )
    monkeypatch.setattr("headwater.services.runtime.hardware.usable_cores", lambda: 4)
    replicas = {
        size: plan(replicas=None, tensor_parallel_size=size).settings.resolved().replicas
        for size in (1, 2, 3)
    }
    assert replicas == {1: 2, 2: 2, 3: 1}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    stages = plan(replicas=None, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert engine_of(stages).pipeline_parallel_size == 2
    assert stages.settings.resolved().replicas == 1
    gpus = plan(device="cuda", replicas=2, tensor_parallel_size=2)
    assert [gpus.engine_env(place)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == [
        "4,5",
        "6,7",
        "4,5",
    ]


@pytest.mark.parametrize(
    ("listed", "device", "replicas", "engines"),
    [
        (None, "cuda", 8, ["0", "1", "2"]),
        ("6,7", "cuda", 2, ["6", "7", "6"]),
        ("GPU-8a, MIG-1b,5", "cuda", 3, ["GPU-8a", "MIG-1b", "5"]),
        ("2,-1,3", "cuda", 1, ["2", "2", "2"]),
        ("", "cpu", 2, []),
        ("-1", "cpu", 2, []),
        ("NoDevFiles", "cpu", 2, []),
    ],
)
def test_engines_take_the_gpus_that_a_variable_leaves_visible(
    listed: str | None,
    device: str,
    replicas: int,
    engines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.services.runtime.hardware.gpu_names", lambda: ("L4",) * 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    stack = plan(device="auto", replicas=None)
    assert (stack.device, stack.settings.resolved().replicas) == (device, replicas)
    if device == "cuda":
        assert [stack.engine_env(place)["CUDA_VISIBLE_DEVICES"] for place in range(3)] == engines
    else:
        # Engines inherit the variable, and the plan does not override it even where a GPU is
        # requested.
        assert "CUDA_VISIBLE_DEVICES" not in plan(device="cuda").engine_env(0)


def test_engines_see_every_gpu_where_none_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems with a GPU have no library by which the driver lists it."""
    monkeypatch.setattr("headwater.services.runtime.hardware.gpu_names", lambda: ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in plan(device="cuda").engine_env(0)


def test_the_threads_that_a_variable_names_are_those_of_every_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWATER_THREADS", "7")
    assert not any(flag.startswith("--threads") for flag in plan().engine(0))


def test_ranks_of_a_simulated_engine_are_refused() -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        flag = name.replace("_", "-")
        with pytest.raises(SettingError, match=f"{flag} is 2; allowed: 1 with executor simulated"):
            plan(**{name: 2}, executor="simulated")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_call_parser", "morse"),
        ("reasoning_parser", "morse"),
        ("kv_disk_dir", Path(__file__) / "blocks"),
    ],
)
def test_what_a_stage_would_refuse_is_refused_before_any_starts(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name.replace("_", "-")):
        StackSettings(**{name: value})  # type: ignore[arg-type]
    assert StackSettings(tool_call_parser="openai", reasoning_parser="mistral")


def test_gateways_are_ready_without_an_engine_where_the_first_request_starts_one() -> None:
    for least, flag in ((0, True), (1, False)):
        flags = plan(replicas=None, min_replicas=least, max_replicas=2).gateway(0, {})
        assert ("--ready-needs-engine=never" in flags) is flag
