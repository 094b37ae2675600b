"""What `--calibration` is given is checked before a model is downloaded or computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from headwater.services.models import calibration
from headwater.services.models.calibration import LEAST_BYTES, MOST_BYTES, read_text
from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import CalibrationFailed, pull
from headwater.services.runtime.progress import silent
from headwater.services.runtime.settings import SettingError

PUBLIC = Path(__file__).parents[2] / "engine_core" / "public_files"
TEXT = "A request goes to the replica that has computed its prefix. " * 200
UNKNOWN = "somebody/something"
"""A model that would have to be downloaded."""


@pytest.fixture(autouse=True)
def without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LIBRARY", "no_such_library")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(file: Path, cache: Path, *, model: str = UNKNOWN, quantization: str = "int4") -> str:
    with pytest.raises(SettingError) as found:
        pull(model, cache_dir=cache, progress=silent, quantization=quantization, calibration=file)
    assert found.value.name == "calibration"
    assert not cache.exists()
    return str(found.value)


@pytest.mark.parametrize(
    ("name", "content", "allowed"),
    [
        ("empty.txt", "", f"a text of at least {LEAST_BYTES} bytes; it has 0"),
        ("blank.txt", " \n" * LEAST_BYTES, f"a text of at least {LEAST_BYTES} bytes; it has 0"),
        ("short.txt", "few words", f"a text of at least {LEAST_BYTES} bytes; it has 9"),
        ("bytes.txt", b"text \xff" * 4096, "text in UTF-8; byte 5 is none"),
        (
            "long.txt",
            b"x" * (MOST_BYTES + 1),
            f"a file of at most {MOST_BYTES} bytes; it has {MOST_BYTES + 1}",
        ),
        (
            "lines.jsonl",
            '{"text": "a"}\n\n{"content": "b"}\n',
            'lines such as {"text": "…"}; line 3 is none',
        ),
        (
            "broken.jsonl",
            '{"text": "a"}\n{"text": \n',
            'lines such as {"text": "…"}; line 2 is none',
        ),
        ("number.jsonl", "17\n", 'lines such as {"text": "…"}; line 1 is none'),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_by_name(
    name: str, content: str | bytes, allowed: str, tmp_path: Path
) -> None:
    file = write(tmp_path / name, content)
    assert (
        refused(file, tmp_path / "cache") == f"--calibration is {str(file)!r}; allowed: {allowed}"
    )


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.txt", tmp_path):
        assert refused(path, tmp_path / "cache").endswith("allowed: an existing file")


def test_lines_of_json_are_one_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": TEXT, "source": idx}) for idx in range(2)]
    assert read_text(write(tmp_path / "text.jsonl", "\n".join(lines))) == f"{TEXT}\n\n{TEXT}"


@pytest.mark.parametrize("quantization", ["auto", "fp8", "gptq"])
def test_only_kinds_of_integers_are_calibrated(quantization: str, tmp_path: Path) -> None:
    sentence = refused(
        write(tmp_path / "text.txt", TEXT), tmp_path / "cache", quantization=quantization
    )
    assert sentence.endswith("allowed: none, or a file together with --quantization int4 or int8")


@pytest.mark.usefixtures("without_the_library")
def test_a_library_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    tmp_path: Path,
) -> None:
    sentence = refused(write(tmp_path / "text.txt", TEXT), tmp_path / "cache")
    assert "AutoRound's library is not installed (pip install 'headwater[calibration]')" in sentence


@pytest.fixture
def with_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is found, so that what comes after the search is reached; it is not imported."""
    monkeypatch.setattr(calibration, "LIBRARY", "json")


@pytest.mark.usefixtures("with_a_library")
@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "gemma3-270m", "model.gguf"])
def test_a_gguf_file_is_not_calibrated_and_not_downloaded(model: str, tmp_path: Path) -> None:
    text = write(tmp_path / "text.txt", TEXT)
    assert refused(text, tmp_path / "cache", model=model).endswith(
        f"the model {model!r} is a GGUF file"
    )


@pytest.mark.usefixtures("with_a_library")
def test_a_converted_folder_is_not_calibrated(tmp_path: Path) -> None:
    write(tmp_path / "model.json", "{}")
    sentence = refused(write(tmp_path / "text.txt", TEXT), tmp_path / "cache", model=str(tmp_path))
    assert sentence.endswith("is a converted folder")


def checkpoint(folder: Path, name: str) -> Path:
    """A public file with a tokenizer of characters beside it."""
    shutil.copytree(PUBLIC / name, folder)
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("with_a_library")
def test_weights_that_are_packed_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "cache_dir": tmp_path / "cache",
        "progress": silent,
        "quantization": "int4",
    }
    text = write(tmp_path / "text.txt", TEXT)
    with pytest.raises(
        CalibrationFailed,
        match="quantization is 'int4'; allowed: auto or auto-round, as the weights",
    ):
        pull(str(checkpoint(tmp_path / "packed", "auto-round")), **asked, calibration=text)
    assert list((tmp_path / "cache" / "packed").glob("[!.]*")) == []
    assert list((tmp_path / "cache" / "packed").glob(".partial-*")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("without_the_library")
@pytest.mark.long
def test_a_checkpoint_that_was_calibrated_with_this_text_is_converted_without_the_library(
    tmp_path: Path,
) -> None:
    """Another text and another kind want the library."""
    text = write(tmp_path / "text.txt", TEXT)
    cache = tmp_path / "cache"
    source = checkpoint(tmp_path / "source", "auto-round")
    asked: dict[str, Any] = {
        "cache_dir": cache,
        "progress": silent,
        "dtype": "float32",
        "device": "cuda",
    }
    revision = pull(str(source), **asked).name.split("-")[0]
    digest = calibration.blake2b(TEXT.encode(), digest_size=8).hexdigest()
    kept = checkpoint(cache / "source" / f"{revision}-int4-calibrated-{digest}", "auto-round")
    report = {"kind": "int4", "bytes_before": 9_000_000, "num_tokens": 8192, "error_ratio": 0.25}
    write(kept / "calibration.json", json.dumps(report))
    folder = pull(str(source), **asked, quantization="int4", calibration=text)
    assert folder.name == f"{revision}-float32-int4-calibrated-{digest}-v3"
    manifest = ModelManifest.read(folder)
    assert manifest.quantization == "int4"
    cost = (
        "calibrated to int4 on 8192 tokens: 9 MB became 0 MB, and layers err 25 % as much as "
        "rounded to nearest"
    )
    assert manifest.rounding.startswith(cost)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "headwater", "kind": "int4"}
    with pytest.raises(SettingError, match="is not installed"):
        pull(str(source), **asked, quantization="int8", calibration=text)
    with pytest.raises(SettingError, match="is not installed"):
        pull(
            str(source),
            **asked,
            quantization="int4",
            calibration=write(tmp_path / "other.txt", TEXT + "!"),
        )
