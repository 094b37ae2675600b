"""Models out of wheels, by real pip from a folder in the place of an index."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from headwater.services.models.wheel_model import (
    WheelModel,
    WheelModelError,
    ZippedWheelModel,
)
from headwater.services.runtime.progress import silent

PARTS = (("tiny-part1", "tiny_part1/data/tiny.00"), ("tiny-part2", "tiny_part2/data/tiny.01"))


def make_wheel(folder: Path, distribution: str, member: str, content: bytes) -> None:
    module = distribution.replace("-", "_")
    info = f"{module}-2.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        # What it depends on is not to be had.
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\nRequires-Dist: no-such\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    for i, (distribution, member) in enumerate(PARTS):
        make_wheel(folder, distribution, member, b"GG" if i == 0 else b"UF")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def model(sha256: str = "", revision: str = "2.0") -> WheelModel:
    return WheelModel(
        name="tiny", revision=revision, title="a tiny model", parts=PARTS, sha256=sha256
    )


@pytest.mark.long
def test_parts_are_joined_in_their_order_once(index: Path, tmp_path: Path) -> None:
    path = model(hashlib.sha256(b"GGUF").hexdigest()).gguf(tmp_path / "cache", silent)
    assert path.name == "tiny-2.0.gguf"
    assert path.read_bytes() == b"GGUF"
    for wheel in index.iterdir():
        wheel.unlink()
    assert model().gguf(tmp_path / "cache", silent) == path
    assert list(path.parent.iterdir()) == [path]


def test_a_file_lies_on_the_disk_before_it_has_its_name(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = sorted(index.iterdir())
    target = tmp_path / "tiny.gguf"
    written: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: written.append((os.fstat(fd).st_size, target.exists()))
    )
    model()._join(zip(wheels, (member for _, member in PARTS), strict=True), tmp_path, target)
    assert written == [(4, False)]
    assert target.read_bytes() == b"GGUF"


def test_another_file_than_expected_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        WheelModelError,
        match=r"a tiny model \(tiny-part1==2\.0\): the file's SHA-256 is .*; expected",
    ):
        model("0" * 64).gguf(tmp_path / "cache", silent)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_what_a_killed_download_left_goes_and_what_another_model_downloads_stays(
    index: Path, tmp_path: Path
) -> None:
    downloads = tmp_path / "cache" / "downloads"
    for name in (".wheel-tiny-left", ".wheel-other-busy"):
        (downloads / name).mkdir(parents=True)
    with pytest.raises(WheelModelError):
        model(revision="3.0").gguf(tmp_path / "cache", silent)
    assert [path.name for path in downloads.iterdir()] == [".wheel-other-busy"]


def test_a_wheel_that_cannot_be_had_is_named_with_pips_last_words(
    index: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        WheelModelError,
        match=r"could not download a tiny model \(tiny-part1==3\.0\): .*tiny-part1==3",
    ):
        model(revision="3.0").gguf(tmp_path / "cache", silent)


def test_a_zipped_folder_is_unpacked_once(index: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "{}")
    make_wheel(index, "tiny-folder", "tiny_folder/model.zip", packed.read_bytes())
    zipped = ZippedWheelModel(
        name="tiny",
        revision="2.0",
        title="a tiny model",
        parts=(("tiny-folder", "tiny_folder/model.zip"),),
    )
    folder = zipped.obtain(tmp_path / "cache", silent)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json")) == [
        "1_Pooling/config.json",
        "config.json",
    ]
    for wheel in index.iterdir():
        wheel.unlink()
    assert zipped.obtain(tmp_path / "cache", silent) == folder
