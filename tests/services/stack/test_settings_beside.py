"""Settings of a model beside the first one of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.settings import SettingError, read_settings
from headwater.services.stack.memory_shares import StartedModel
from headwater.services.stack.settings import StackSettings
from headwater.services.stack.settings_beside import left_out, plan_beside, settings_beside
from tests.services.stack.test_plan import plan

CACHED = StartedModel(folder=Path("/judge"), name="judge", weight_bytes=1, has_cache=True)
ENCODER = StartedModel(folder=Path("/e"), name="embedder", weight_bytes=1, has_cache=False)
GIVEN = StackSettings(
    device="cpu",
    replicas=1,
    kv_swap_memory=1 << 20,
    kv_peer_memory=1 << 20,
    numerics="tree",
    max_model_len=64,
)


def test_a_model_with_a_cache_has_all_but_what_speaks_of_the_first() -> None:
    own = settings_beside(GIVEN, CACHED)
    assert own.max_model_len is None
    assert (own.kv_swap_memory, own.kv_peer_memory, own.numerics) == (1 << 20, 1 << 20, "tree")
    assert left_out(GIVEN, CACHED) == ""


def test_an_encoder_has_no_cache_and_the_flags_that_it_is_not_given_are_named() -> None:
    own = settings_beside(GIVEN, ENCODER)
    assert (own.kv_swap_memory, own.kv_peer_memory, own.numerics) == (0, 0, "default")
    assert left_out(GIVEN, ENCODER) == (
        "embedder: without --kv-swap-memory, --kv-peer-memory, --numerics, which encoders do not "
        "have"
    )
    assert left_out(StackSettings(device="cpu"), ENCODER) == ""


@pytest.mark.parametrize("name", ["served_model_name", "revision"])
def test_one_name_and_one_revision_are_those_of_one_model(name: str) -> None:
    with pytest.raises(SettingError, match="allowed: none with several models; NAME=MODEL"):
        StackSettings(model=("a", "b"), **{name: "x"})  # type: ignore[arg-type]
    assert StackSettings(model=("a",), **{name: "x"})  # type: ignore[arg-type]


def test_shares_of_a_gpu_reach_the_engine() -> None:
    stack = plan(gpu_memory_utilization=0.25)
    engine = read_settings(EngineSettings, stack.engine(0), env={})
    assert engine.gpu_memory_utilization == 0.25


def test_a_loaded_model_has_settings_of_its_own_the_name_it_was_asked_by_among_them() -> None:
    own = {"model": ("Some/judge",), "served_model_name": None, "max_model_len": 32}
    stack = plan_beside(plan(), GIVEN, CACHED, set(), **own)
    assert (stack.settings.model, stack.settings.max_model_len) == (("Some/judge",), 32)
    assert (stack.served_name, stack.model_folder) == ("judge", Path("/judge"))
