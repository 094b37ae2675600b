"""New weights of a model's engines: all of them have them, or none does, also after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.services.models.manifest import LAYOUT, ModelManifest
from headwater.services.stack import engine_calls
from headwater.services.stack.engine_calls import EngineCallFailed, LoadedWeights
from headwater.services.stack.model_stages import ModelStages
from headwater.services.stack.new_weights import WeightsRefused, replace_weights
from headwater.services.stack.remembered_weights import RememberedWeights, Replacement

MANIFEST = ModelManifest(
    name="m",
    revision="1",
    dtype="float32",
    layout=LAYOUT,
    architecture="LlamaForCausalLM",
    vocab_size=100,
    max_model_len=64,
    eos_token_ids=(1,),
    bos_token_id=None,
    source="",
)


@dataclass(frozen=True)
class Plan:
    model_folder: Path
    weights_folder: Path | None = None


@dataclass
class Engines:
    """Engines by address, as calls find them."""

    refuses: set[str] = field(default_factory=set)
    dies: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    replaced: dict[str, bool] = field(default_factory=dict)
    loses_answers: set[str] = field(default_factory=set)
    on_load: Any = None
    on_replace: Any = None

    async def load_weights(self, address: str, folder: Path) -> LoadedWeights:
        if address in self.refuses:
            raise EngineCallFailed("num_layers of the new weights is 2")
        self.loaded.add(address)
        if self.on_load is not None:
            self.on_load()
        return LoadedWeights(7, "new")

    async def drop_weights(self, address: str, number: int) -> None:
        self.loaded.remove(address)

    async def replace_weights(self, address: str, number: int, *, ends_requests: bool) -> float:
        if self.on_replace is not None:
            self.on_replace(address)
        if address in self.dies:
            raise EngineCallFailed("connection refused")
        assert number == 7
        self.replaced[address] = ends_requests
        if address in self.loses_answers:
            raise EngineCallFailed("deadline exceeded")
        return 0.5

    async def described(self, address: str) -> Any:
        if address in self.dies:
            raise EngineCallFailed("connection refused")
        return SimpleNamespace(numerics_id="new" if address in self.replaced else "old")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    for name in ("load_weights", "drop_weights", "replace_weights", "described"):
        monkeypatch.setattr(engine_calls, name, getattr(found, name))
    return found


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, revision in ((old, "1"), (new, "2")):
        folder.mkdir()
        replace(MANIFEST, revision=revision).write(folder)
        (folder / "tokenizer.json").write_text("{}")
    return old, new


def model_of(folder: Path, *addresses: str) -> ModelStages:
    stages = {
        i: SimpleNamespace(name=f"engine-{i}", addresses={"grpc": each})
        for i, each in enumerate(addresses)
    }
    model = SimpleNamespace(
        name="m", plan=Plan(folder), engines=stages, leaving={}, weights="", started_with={}
    )
    return cast("ModelStages", model)


@pytest.fixture
def remembered(tmp_path: Path) -> RememberedWeights:
    return RememberedWeights(tmp_path / "state")


async def test_all_engines_have_them_and_so_have_those_that_start_later(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a", "b")
    assert await replace_weights(model, new, remembered, ends_requests=True) == (0.5, [])
    assert engines.replaced == {"a": True, "b": True}
    assert model.plan is not None
    assert (model.plan.weights_folder, model.weights) == (new, "2")


async def test_no_engine_has_new_weights_where_one_refuses(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a", "b", "c")
    engines.refuses = {"b"}
    with pytest.raises(WeightsRefused, match="num_layers of the new weights is 2"):
        await replace_weights(model, new, remembered, ends_requests=False)
    assert (engines.loaded, engines.replaced, model.weights) == (set(), {}, "")
    assert model.plan == Plan(old)


async def test_no_engine_has_new_weights_where_one_joins_meanwhile(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a")
    engines.on_load = lambda: model.engines.update(
        {1: cast("Any", SimpleNamespace(addresses={"grpc": "b"}))}
    )
    with pytest.raises(WeightsRefused, match="came or went"):
        await replace_weights(model, new, remembered, ends_requests=False)
    assert (engines.loaded, engines.replaced) == (set(), {})


async def test_no_engine_has_new_weights_where_one_leaves_meanwhile(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a", "b")
    engines.on_load = lambda: model.engines.pop(1, None)
    with pytest.raises(WeightsRefused, match="came or went"):
        await replace_weights(model, new, remembered, ends_requests=False)
    engines.on_load = model.engines.clear
    with pytest.raises(WeightsRefused, match="has no engine"):
        await replace_weights(model, new, remembered, ends_requests=False)
    assert (engines.loaded, engines.replaced) == (set(), {})


async def test_an_engine_that_dies_behind_the_first_is_named(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a", "b", "c")
    engines.dies = {"b"}
    engines.loses_answers = {"c"}
    assert await replace_weights(model, new, remembered, ends_requests=False) == (0.5, [1])
    assert engines.replaced == {"a": False, "c": False}


async def test_an_engine_that_was_started_again_behind_the_first_has_them(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a", "b")
    engines.dies = {"b"}
    engines.on_replace = lambda address: model.started_with.update(
        {1: new} if address == "b" else {}
    )
    assert await replace_weights(model, new, remembered, ends_requests=False) == (0.5, [])


async def test_all_others_keep_theirs_where_the_first_one_fails(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights, tmp_path: Path
) -> None:
    old, new = folders
    model = model_of(old, "a", "b")
    engines.dies = {"a", "b"}
    with pytest.raises(WeightsRefused, match="engine-0 did not take them: connection") as refused:
        await replace_weights(model, new, remembered, ends_requests=False)
    assert refused.value.lost == (0,)
    assert (engines.loaded, engines.replaced, model.weights) == (set(), {}, "")
    assert model.plan == Plan(old)
    assert RememberedWeights(tmp_path / "state").of("m") is None


async def test_they_are_kept_before_an_engine_computes_with_them(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights, tmp_path: Path
) -> None:
    old, new = folders
    found: list[Replacement | None] = []
    engines.on_replace = lambda _: found.append(RememberedWeights(tmp_path / "state").of("m"))
    await replace_weights(model_of(old, "a"), new, remembered, ends_requests=False)
    assert found == [Replacement("1", str(new))]


async def test_no_engine_has_new_weights_where_they_cannot_be_kept(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights, tmp_path: Path
) -> None:
    old, new = folders
    (tmp_path / "state").write_text("no folder")
    model = model_of(old, "a")
    with pytest.raises(OSError, match="state"):
        await replace_weights(model, new, remembered, ends_requests=False)
    assert (engines.loaded, engines.replaced, model.plan) == (set(), {}, Plan(old))


async def test_what_text_stages_read_has_to_be_the_same(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    (new / "tokenizer.json").write_text("{ }")
    with pytest.raises(WeightsRefused, match=r"tokenizer\.json of the new weights differs"):
        await replace_weights(model_of(old, "a"), new, remembered, ends_requests=False)
    replace(MANIFEST, vocab_size=90).write(new)
    with pytest.raises(WeightsRefused, match="vocab_size of the new weights is 90; allowed: 100"):
        await replace_weights(model_of(old, "a"), new, remembered, ends_requests=False)
    assert engines.loaded == set()


async def test_nothing_is_replaced_while_an_engine_starts(
    engines: Engines, folders: tuple[Path, Path], remembered: RememberedWeights
) -> None:
    old, new = folders
    model = model_of(old, "a")
    model.engines[1] = cast("Any", SimpleNamespace(addresses={}))
    with pytest.raises(WeightsRefused, match="just starting or leaving"):
        await replace_weights(model, new, remembered, ends_requests=False)
