from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from headwater.services.models import child_folder
from headwater.services.models.hugging_face import HubError
from headwater.services.models.manifest import LAYOUT, ModelManifest
from headwater.services.models.store import (
    ModelNotFound,
    OtherModelCode,
    default_cache_dir,
    find_source,
    name_of,
    point,
    pull,
)
from headwater.services.runtime.progress import silent
from headwater.services.runtime.settings import SettingError


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"HEADWATER_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/headwater"),
        ({"XDG_CACHE_HOME": ""}, str(Path.home() / ".cache/headwater")),
    ],
)
def test_the_cache_is_where_the_environment_says(env: dict[str, str], folder: str) -> None:
    assert str(default_cache_dir(env)) == folder


def test_the_demo_model_is_known_without_a_network(tmp_path: Path) -> None:
    source = find_source(
        "smollm2-135m-instruct", revision=None, cache_dir=tmp_path, progress=silent
    )
    assert (source.name, source.revision) == ("smollm2-135m-instruct", "0.1.2")


def test_gemma_is_known_by_name_with_its_terms(tmp_path: Path) -> None:
    source = find_source("gemma3-270m", revision=None, cache_dir=tmp_path, progress=silent)
    assert (source.name, source.revision) == ("gemma3-270m", "1.0.0")
    assert source.origin.endswith("(Gemma Terms of Use, ai.google.dev/gemma/terms)")


def test_a_gguf_file_is_named_by_its_stem_and_its_revision_by_its_content(tmp_path: Path) -> None:
    paths = [
        tmp_path / "a" / "tiny.gguf",
        tmp_path / "b" / "tiny.gguf",
        tmp_path / "c" / "tiny.gguf",
    ]
    for path, content in zip(paths, (b"one", b"one", b"two"), strict=True):
        path.parent.mkdir()
        path.write_bytes(content)
    first, same, other = (
        find_source(str(path), revision=None, cache_dir=tmp_path, progress=silent) for path in paths
    )
    assert first.name == "tiny"
    assert first.revision == same.revision != other.revision


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_a_folder_whose_files_change_is_another_revision(name: str, tmp_path: Path) -> None:
    for each in ("config.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / each).write_bytes(b"one")
    before = find_source(str(tmp_path), revision=None, cache_dir=tmp_path, progress=silent)
    (tmp_path / name).write_bytes(b"two")
    assert (
        find_source(str(tmp_path), revision=None, cache_dir=tmp_path, progress=silent).revision
        != before.revision
    )


def test_metadata_of_a_large_gguf_file_that_change_in_place_make_another_revision(
    tmp_path: Path,
) -> None:
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    before = find_source(str(path), revision=None, cache_dir=tmp_path, progress=silent)
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"1")
    assert (
        find_source(str(path), revision=None, cache_dir=tmp_path, progress=silent).revision
        != before.revision
    )


def test_a_name_that_is_nothing_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFound,
        match=r"the model is 'nosuch'; allowed: smollm2-135m-instruct, gemma3-270m, all-minilm-l6-v2, a",
    ):
        pull("nosuch", cache_dir=tmp_path, progress=silent)


@pytest.mark.parametrize(
    ("file", "model", "found"),
    [
        ("config.json", "", "is a folder"),
        ("model.json", "", "is a converted folder"),
        ("tiny.gguf", "tiny.gguf", "is a GGUF file"),
        ("", "smollm2-135m-instruct", "has one revision, 0.1.2"),
    ],
)
def test_a_revision_of_a_model_that_is_not_on_the_hub_is_refused(
    file: str, model: str, found: str, tmp_path: Path
) -> None:
    named = model
    if file:
        (tmp_path / file).write_bytes(b"{}")
        named = str(tmp_path / model)
    with pytest.raises(SettingError) as refused:
        pull(named, cache_dir=tmp_path / "cache", progress=silent, revision="main")
    allowed = f"none, or a model on the Hugging Face Hub: the model {named!r} {found}"
    assert str(refused.value) == f"--revision is 'main'; allowed: {allowed}"
    assert not (tmp_path / "cache").exists()


def test_a_revision_of_a_model_that_is_nothing_does_not_hide_that(tmp_path: Path) -> None:
    for name in ("nosuch", str(tmp_path / "nosuch.gguf"), str(tmp_path)):
        with pytest.raises(ModelNotFound):
            pull(name, cache_dir=tmp_path / "cache", progress=silent, revision="main")


def test_a_hub_id_that_cannot_be_had_offline_says_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"give a local folder or a \.gguf file instead"):
        pull("somebody/something", cache_dir=tmp_path, progress=silent)


def test_what_is_no_id_of_the_hub_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        HubError, match="'some body/it' is no id of the Hub: Repo id must use alphanumeric chars"
    ):
        pull("some body/it", cache_dir=tmp_path, progress=silent)


def test_a_path_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    lacks = {
        str(tmp_path): ", a folder without config.json; allowed: ",
        str(tmp_path / "notes.txt"): ", a file that is no .gguf file; allowed: ",
        str(tmp_path / "absent"): ", and there is no such folder; allowed: ",
        "~/no-such-folder-here": ", and there is no such folder; allowed: ",
        str(tmp_path / "absent.gguf"): ", and there is no such file; allowed: ",
        "~nobody-of-this-name/model": ", and there is no such folder; allowed: ",
        "nowhere": "; allowed: ",
    }
    for model, words in lacks.items():
        with pytest.raises(ModelNotFound) as refusal:
            name_of(model)
        assert str(refusal.value).startswith(f"the model is {model!r}{words}")


def test_a_gguf_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"the model is 'models/absent\.gguf', and there is"):
        pull("models/absent.gguf", cache_dir=tmp_path, progress=silent)


def test_weights_in_two_layouts_are_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "fp8/model.safetensors",
    ]
    downloaded: list[str] = []
    (tmp_path / "model-00001-of-00002.safetensors").touch()

    def snapshot_download(
        repo: str, *, allow_patterns: list[str], ignore_patterns: list[str], **other: object
    ) -> str:
        found = filter_repo_objects(
            there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        downloaded.extend(found)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    find_source("somebody/something", revision=None, cache_dir=tmp_path, progress=silent)
    assert downloaded == there[:2]


def test_a_converted_folder_is_served_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    assert pull(str(tmp_path), cache_dir=tmp_path, progress=silent) == tmp_path


def test_a_converted_folder_in_the_home_folder_is_served_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "converted"
    folder.mkdir()
    for name in ("model.json", "config.json"):
        (folder / name).write_text("{}")
    assert pull("~/converted", cache_dir=tmp_path, progress=silent) == folder


def test_a_converted_folder_for_other_code_is_refused(tmp_path: Path) -> None:
    manifest = ModelManifest(
        name="a",
        revision="b",
        dtype="float32",
        layout=LAYOUT,
        architecture="LlamaForCausalLM",
        vocab_size=8,
        max_model_len=8,
        eos_token_ids=(),
        bos_token_id=None,
        source="",
    )
    manifest.write(tmp_path)
    asked: dict[str, Any] = {"cache_dir": tmp_path, "progress": silent}
    assert pull(str(tmp_path), **asked, model_code="headwater") == tmp_path
    with pytest.raises(OtherModelCode, match="is 'transformers'; allowed: auto or headwater"):
        pull(str(tmp_path), **asked, model_code="transformers")


def test_models_of_each_code_have_folders_of_their_own(tmp_path: Path) -> None:
    home = tmp_path / "smollm2-135m-instruct"
    for name in (f"0.1.2-float32-{LAYOUT}", f"0.1.2-float32-transformers-{LAYOUT}"):
        (home / name).mkdir(parents=True)
    asked: dict[str, Any] = {"cache_dir": tmp_path, "progress": silent, "dtype": "float32"}
    found = pull("smollm2-135m-instruct", **asked, model_code="transformers")
    assert found.name == f"0.1.2-float32-transformers-{LAYOUT}"


def test_a_model_in_the_cache_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-135m-instruct" / f"0.1.2-float32-{LAYOUT}"
    folder.mkdir(parents=True)
    assert (
        pull("smollm2-135m-instruct", cache_dir=tmp_path, progress=silent, dtype="float32")
        == folder
    )


def test_a_link_leads_to_a_folder_of_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "m").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        point(Path("links/served"), Path("cache/m"))
        assert (tmp_path / "links/served").resolve() == tmp_path / "cache" / "m"


def test_a_folder_lies_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "partial"
    folder = tmp_path / "whole"
    partial.mkdir()
    (partial / "weights").write_bytes(b"1")
    written: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: written.append((os.fstat(fd).st_ino, folder.exists()))
    )
    child_folder._keep(partial, as_=folder)
    inodes = [path.stat().st_ino for path in (folder / "weights", folder, tmp_path)]
    assert written == [(inodes[0], False), (inodes[1], False), (inodes[2], True)]
