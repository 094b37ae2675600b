"""A model's config is judged before anything else of it is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from headwater.bench.published_shapes import STATES
from headwater.engine_core.models.registry import config_of
from headwater.services.engine.programs.judge import sentence
from headwater.services.models.judging import ModelNotServed
from headwater.services.models.store import find_source, judge, pull
from headwater.services.runtime.settings import SettingError
from tests.engine_core.small_models import SHAPE

LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"]}


def silent(what: str, done: int, total: int) -> None:
    pass


class Hub:
    """One repository, in the place of the Hub's client."""

    def __init__(self, files: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self._files = files
        self._cache = cache
        self.downloaded: list[str] = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._snapshot_download)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", self._model_info)

    def _snapshot_download(
        self, repo: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        there = [
            path.relative_to(self._files).as_posix()
            for path in self._files.rglob("*")
            if path.is_file()
        ]
        wanted = filter_repo_objects(
            there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        self._cache.mkdir(exist_ok=True)
        for name in wanted:
            self.downloaded.append(name)
            (self._cache / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self._files / name, self._cache / name)
        return str(self._cache)

    def _model_info(self, repo: str, **_: Any) -> SimpleNamespace:
        siblings = [
            SimpleNamespace(rfilename=path.name, size=path.stat().st_size)
            for path in self._files.iterdir()
        ]
        return SimpleNamespace(siblings=siblings)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(LLAMA))
    (files / "model.safetensors").write_bytes(bytes(30_000_000))
    return Hub(files, monkeypatch, tmp_path / "commit")


def test_an_architecture_that_is_not_served_is_refused_before_its_weights_are_downloaded(
    hub: Hub, tmp_path: Path
) -> None:
    config = tmp_path / "files" / "config.json"
    config.write_text(json.dumps(LLAMA | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelNotServed, match="architectures is 'MambaForCausalLM'; allowed: Bert"):
        pull("somebody/something", cache_dir=tmp_path / "cache", progress=silent, device="cpu")
    assert hub.downloaded == ["config.json"]


@pytest.mark.long
def test_a_size_that_the_device_does_not_serve_is_refused_before_a_download(
    hub: Hub, tmp_path: Path
) -> None:
    config = tmp_path / "files" / "config.json"
    config.write_text(json.dumps(LLAMA | {"head_dim": 20}))
    with pytest.raises(ModelNotServed, match="head_dim is 20; allowed: multiples of 16 on the pl"):
        pull("somebody/something", cache_dir=tmp_path / "cache", progress=silent, device="cpu")
    assert hub.downloaded == ["config.json"]


@pytest.mark.long
def test_a_dry_run_says_what_a_model_takes(hub: Hub, tmp_path: Path) -> None:
    found = judge(
        "somebody/something",
        cache_dir=tmp_path / "cache",
        progress=silent,
        dtype="bfloat16",
        device="cpu",
    )
    # 2 · 512 · 64 weights of embedding and head, 3 · 36,992 of layers; 2 · 3 · 2 · 16 numbers of
    # KV cache a token.
    assert found == (
        "LlamaForCausalLM: 0.2 million weights, 0.00 GB of memory in bfloat16; "
        "0.4 kB of KV cache a token, up to 1,024 tokens; 0.03 GB to download"
    )
    assert hub.downloaded == ["config.json"]


@pytest.mark.long
def test_a_dry_run_judges_the_code_that_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    config = tmp_path / "files" / "config.json"
    config.write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    asked: dict[str, Any] = {"cache_dir": tmp_path / "cache", "progress": silent, "device": "cpu"}
    found = judge("somebody/something", **asked, model_code="transformers")
    assert found.startswith("LlamaForCausalLM by transformers ")
    bloom = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    config.write_text(json.dumps(LLAMA | bloom))
    with pytest.raises(ModelNotServed, match="architectures is 'BloomForCausalLM'; allowed: arch"):
        pull("somebody/something", **asked, model_code="transformers")
    assert set(hub.downloaded) == {"config.json"}


@pytest.mark.long
def test_a_repository_without_safetensors_is_downloaded_as_torch_files(
    hub: Hub, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    (files / "model.safetensors").rename(files / "pytorch_model.bin")
    found = find_source("a/b", revision=None, cache_dir=tmp_path / "cache", progress=silent)
    assert found.obtain(silent) == tmp_path / "commit"
    assert hub.downloaded == ["config.json", "pytorch_model.bin"]
    assert judge("a/b", cache_dir=tmp_path, progress=silent).endswith("0.03 GB to download")


def test_templates_in_a_folder_are_downloaded_and_weights_in_folders_are_not(
    hub: Hub, tmp_path: Path
) -> None:
    names = ["additional_chat_templates/tool_use.jinja", "onnx/model.safetensors", "onnx/a.json"]
    for name in names:
        path = tmp_path / "files" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    find_source("a/b", revision=None, cache_dir=tmp_path / "cache", progress=silent).obtain(silent)
    assert {*hub.downloaded} == {"config.json", "model.safetensors", names[0]}


def test_a_dry_run_of_a_file_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SettingError, match="dry-run is True; allowed: with a model on the Hugging"):
        judge(str(tmp_path / "model.gguf"), cache_dir=tmp_path, progress=silent)


def test_the_sentence_of_a_model_with_states_says_what_they_take() -> None:
    message = sentence(config_of(STATES["Qwen3.6-35B-A3B"]), "bfloat16", 16)
    assert (
        "20.5 kB of KV cache a token, 79.3 MB of states a sequence, up to 32,768 tokens" in message
    )
