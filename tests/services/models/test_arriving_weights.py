"""A repository of several shards is converted while its later shards arrive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from headwater.services.models.arriving_weights import arriving_weights
from headwater.services.models.hugging_face import HubError
from headwater.services.runtime.progress import silent
from tests.chatting_model import make_chatting_model
from tests.polling import holds_within
from tests.services.models.local_hub import COMMIT, REPO, LocalHub

PULL = """
import sys
from headwater.services.models import hugging_face, pulling
hugging_face.LARGE_BYTES = 1
pulling.main()
"""
LAST = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    converted = make_chatting_model(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model" / "hf")
    size = sum(each.nbytes for each in model.state_dict().values())
    model.save_pretrained(folder / "shards", max_shard_size=size * 2 // 3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "shards" / name).write_bytes((converted / name).read_bytes())
    assert (folder / "shards" / LAST).is_file()
    return folder / "shards"


def pulling(model: str, cache: Path, hub: LocalHub) -> subprocess.Popen[str]:
    env = {name: each for name, each in os.environ.items() if not name.startswith("HF_")}
    settings = (model, str(cache), "float32", "cpu", "auto", "auto", "", "")
    return subprocess.Popen(
        [sys.executable, "-c", PULL, *settings],
        env=env | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def packed_of(files: dict[str, bytes]) -> bytes:
    [packed] = (files[name] for name in files if name.startswith("packed-"))
    return packed


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_begins_with_the_first_shard_and_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    with LocalHub(files_of(checkpoint)).served() as hub:
        hub.stopped[LAST] = 0
        pull = pulling(REPO, tmp_path / "hub", hub)
        assert pull.stdout is not None
        for line in pull.stdout:
            if "converting" in line and json.loads(line)["done"]:
                break
        else:
            raise AssertionError(pull.communicate()[1])
        assert hub.is_stopped.is_set()
        hub.stopped.clear()
        hub.goes_on.set()
        printed, problem = pull.communicate(timeout=200)
        assert pull.returncode == 0, problem
        whole, _ = pulling(str(checkpoint), tmp_path / "disk", hub).communicate(timeout=200)
    found, expected = (
        files_of(Path(json.loads(each.splitlines()[-1])["folder"])) for each in (printed, whole)
    )
    for name in ("weights.safetensors", "config.json", "tokenizer.json"):
        assert found[name] == expected[name]
    # The name of packed matrices has the time of the weights that they were made of.
    assert packed_of(found) == packed_of(expected)
    assert not list((tmp_path / "hub").glob(".arriving-*"))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_download_that_fails_ends_the_conversion_by_its_own_words(
    checkpoint: Path, tmp_path: Path
) -> None:
    files = files_of(checkpoint)
    with LocalHub(files).served() as hub:
        hub.damaged[LAST] = 2
        pull = pulling(REPO, tmp_path, hub)
        _, problem = pull.communicate(timeout=200)
    assert pull.returncode != 0
    assert "was damaged on its way, twice" in problem
    assert [each.name for each in (tmp_path / "owner--name").iterdir()] == [".lock"]


def test_a_failure_of_the_download_is_raised_in_place_of_what_it_caused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights_folder(repo: str, **_: object) -> Path:
        raise HubError(f"{repo} is gone")

    monkeypatch.setattr("headwater.services.models.arriving_weights.weights_folder", weights_folder)

    def convert() -> None:
        with arriving_weights("m", COMMIT, tmp_path, silent) as marker:
            assert holds_within(lambda: not marker.exists(), 60)
            raise ValueError("a shard is missing")

    with pytest.raises(HubError, match="m is gone"):
        convert()
    assert list(tmp_path.iterdir()) == []
