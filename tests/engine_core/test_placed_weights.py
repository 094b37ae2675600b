"""Weights in one piece of memory that outlives an engine. Files in memory stand for a GPU's memory,
and a holder in this process for one of its own."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headwater.bench.workloads import PACKINGS, tiny
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.weights import load_weights
from headwater.engine_core.executors.device import cuda_memory, placed_weights
from headwater.engine_core.executors.device.cuda_memory import CudaMemory
from headwater.engine_core.executors.device.moved_tensors import tensors_of
from headwater.engine_core.executors.device.placed_weights import EngineWeights, HeldWeights
from headwater.engine_core.executors.device.weights_place import WeightsPlace, key_of
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.options import BuildRequest, ExecutorOptions, ignore_progress
from headwater.engine_core.platforms.stored_weights import StoredForms
from headwater.engine_core.system.held_memory import HeldMemory, held_bytes
from tests.engine_core.test_compiled_ahead import MODEL
from tests.engine_core.test_held_memory import Holder

CPU = torch.device("cpu")
REQUEST = BuildRequest(
    options=ExecutorOptions(model_folder=None),
    model=MODEL,
    dtype="bfloat16",
    kv_format="bfloat16",
    activations="bfloat16",
    rounds_tokens=False,
)


class FileMemory:
    """See `DeviceMemory`."""

    def __init__(
        self, num_bytes: int, *, is_shared: bool = False, exported: int | None = None
    ) -> None:
        self.num_bytes = num_bytes
        self._is_shared = is_shared or exported is not None
        self._file = -1
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.map(exported)

    def map(self, exported: int | None = None) -> None:
        self._file = os.memfd_create("device") if exported is None else os.dup(exported)
        os.ftruncate(self._file, self.num_bytes)
        memory = torch.frombuffer(mmap.mmap(self._file, self.num_bytes), dtype=torch.uint8)
        if self.bytes.numel():
            # NOTE: a GPU's addresses stay; here tensors go on to read the file that was unmapped.
            self.bytes.set_(memory)
        else:
            self.bytes = memory

    def export(self) -> int:
        assert self._is_shared
        return os.dup(self._file)

    def unmap(self) -> None:
        os.close(self._file)


class UnlockedMemory:
    """See `LockedMemory`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class HolderHere:
    """See `MemoryHolder`."""

    def __init__(self) -> None:
        self.key = ""
        self.held: HeldMemory | None = None

    def take(self, key: str) -> HeldMemory | None:
        if self.held is None or self.key != key:
            return None
        return _copied(self.held)

    def keep(self, key: str, held: HeldMemory) -> bool:
        self.key = key
        self.held = _copied(held)
        return True

    def drop(self) -> None:
        self.held = None


def _copied(held: HeldMemory) -> HeldMemory:
    return replace(held, memory=os.dup(held.memory), layout=os.dup(held.layout))


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_weights, "DeviceMemory", FileMemory)
    monkeypatch.setattr(placed_weights, "can_share", lambda: True)
    monkeypatch.setattr(placed_weights, "on_device", tensors_of)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))


def random_weights(folder: Path, model: str = "qwen3-0.6b", packing: str = "") -> Weights:
    config = tiny(model) | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "vocab_size": 512,
    }
    config |= {"quantization_config": PACKINGS[packing]} if packing else {}
    (folder / "config.json").write_text(json.dumps(config))
    options = ExecutorOptions(model_folder=folder, load_format="dummy")
    request = checked(options, "cpu", cpu.capabilities)
    return load_weights(request, CPU, ignore_progress, StoredForms(keeps_packed=True))


def never() -> Weights:
    raise AssertionError("weights that are held are not loaded")


@pytest.mark.parametrize(
    ("model", "packing"),
    [("qwen3-0.6b", ""), *(("qwen3-0.6b", each) for each in PACKINGS), ("gpt-oss-20b", "")],
)
def test_held_weights_are_those_that_were_loaded(tmp_path: Path, model: str, packing: str) -> None:
    holder = HolderHere()
    loaded = random_weights(tmp_path, model, packing)
    before = [each.clone() for each in tensors_of(loaded)]
    first = HeldWeights(holder, "key")
    weights, placed = first.taken_or(lambda: loaded)
    assert weights is loaded
    assert placed is not None

    second = HeldWeights(holder, "key")
    found, again = second.taken_or(never)
    assert again is not None
    assert (first.were_held, second.were_held) == (False, True)
    for kind in ("linears", "tensors", "tables", "experts"):
        ours, theirs = getattr(found, kind), getattr(loaded, kind)
        assert {name: type(each) for name, each in ours.items()} == {
            name: type(each) for name, each in theirs.items()
        }
    tensors = tensors_of(found)
    assert all(map(torch.equal, tensors, before))
    assert [each.stride() for each in tensors] == [each.stride() for each in tensors_of(loaded)]
    # They are the same memory, not copies of it.
    placed.bytes.zero_()
    assert not any(each.float().any() for each in tensors)


def test_other_weights_and_memory_that_was_written_to_are_loaded(tmp_path: Path) -> None:
    holder = HolderHere()
    loaded = random_weights(tmp_path)
    _, placed = HeldWeights(holder, "key").taken_or(lambda: loaded)
    assert placed is not None
    others = random_weights(tmp_path)
    found, _ = HeldWeights(holder, "another key").taken_or(lambda: others)
    assert found is others
    assert holder.key == "another key"

    _, written = HeldWeights(holder, "another key").taken_or(never)
    assert written is not None
    written.bytes[placed.num_bytes // 2] += 1
    found, placed = HeldWeights(holder, "another key").taken_or(lambda: loaded)
    assert found is loaded
    # What took their place is held.
    HeldWeights(holder, "another key").taken_or(never)


@pytest.mark.parametrize("why", ["no room", "no export"])
def test_weights_that_cannot_be_held_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "no room":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1 << 40))
    else:
        monkeypatch.setattr(placed_weights, "can_share", lambda: False)
    holder = HolderHere()
    _, placed = HeldWeights(holder, "key").taken_or(lambda: random_weights(tmp_path))
    assert placed is None
    assert holder.held is None
    sent = {"no room": "0.0 GB are free", "no export": "exports no memory"}[why]
    assert sent in caplog.text


def test_a_sleeping_engine_holds_nothing_and_holds_again_what_it_wakes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(cuda_memory, "LockedMemory", UnlockedMemory)
    holder = HolderHere()
    held = HeldWeights(holder, "key")
    weights, placed = held.taken_or(lambda: random_weights(tmp_path))
    assert placed is not None
    before = [each.clone() for each in tensors_of(weights)]
    memory = CudaMemory(placed, held)
    memory.release()
    assert holder.held is None
    memory.restore()
    found, _ = HeldWeights(holder, "key").taken_or(never)
    assert all(map(torch.equal, tensors_of(found), before))


def test_weights_of_drafters_are_held_with_those_of_the_served_model(tmp_path: Path) -> None:
    holder = HolderHere()
    loaded = EngineWeights(*(random_weights(tmp_path) for _ in range(3)))
    before = [each.clone() for each in tensors_of(loaded)]
    HeldWeights(holder, "key").taken_or(lambda: loaded)
    second = HeldWeights(holder, "key")
    found, _ = second.taken_or(never)
    assert isinstance(found, EngineWeights)
    assert all(map(torch.equal, tensors_of(found), before))
    assert second.num_bytes >= sum(each.nbytes for each in before)


def test_the_holders_descriptor_stays_open_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(uuid="gpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    holder = Holder()
    requests = holder.requests.fileno()
    options = ExecutorOptions(model_folder=tmp_path, weights_holder=requests)
    # An engine that takes no turns needs its place no more when the weights are there.
    WeightsPlace(replace(REQUEST, options=options), ignore_progress)
    os.fstat(requests)
    assert held_bytes(requests) == 0
    holder.close()


def test_weights_are_found_again_until_a_file_of_them_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(uuid="gpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    folders = [tmp_path / name for name in ("served", "draft", "heads")]
    files = [folder / "weights.safetensors" for folder in folders]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"1")
    served, draft, heads = folders
    options = ExecutorOptions(model_folder=served, draft_model=draft, draft_heads=heads)
    request = replace(REQUEST, options=options)
    keys = [key_of(request)]
    assert key_of(request) == keys[0]
    for file in files:
        file.write_bytes(b"12")
        keys.append(key_of(request))
    drafting = replace(request, draft=replace(request, dtype="float32"))
    keys += [key_of(drafting), key_of(replace(drafting, draft=request))]
    assert len(set(keys)) == len(keys)
