"""Large files in ranges: over several connections, on from where a download stopped, and whole or
not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.services.models import ranged_download
from headwater.services.models.ranged_download import NoRanges, RangedDownload, WrongContent
from tests.services.models.local_hub import COMMIT, REPO, LocalHub, etag

CONTENT = os.urandom(1000)
NAME = "model.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setattr(ranged_download, "RANGE_BYTES", 300)
    with LocalHub({NAME: CONTENT}).served() as found:
        yield found


def download(hub: LocalHub, target: Path) -> list[int]:
    """Numbers of bytes that were reported."""
    counts: list[int] = []
    url = f"{hub.url}/{REPO}/resolve/{COMMIT}/{NAME}"
    digest = etag(NAME, CONTENT)
    RangedDownload(url, {}, len(CONTENT), digest, target, counts.append).run()
    return counts


def starts(hub: LocalHub) -> list[int]:
    found = sorted(start for _, start in hub.ranges)
    hub.ranges.clear()
    return found


def test_a_file_comes_in_ranges(hub: LocalHub, tmp_path: Path) -> None:
    assert sum(download(hub, tmp_path / "file")) == len(CONTENT)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert starts(hub) == [0, 300, 600, 900]
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_ranges_that_have_come_are_not_asked_for_again(hub: LocalHub, tmp_path: Path) -> None:
    partial = bytearray(CONTENT)
    partial[600:900] = bytes(300)
    (tmp_path / "file.ranges").write_bytes(partial)
    # The last line was cut off when the process was killed.
    (tmp_path / "file.ranges-done").write_text("0\n300\n900\n60")
    assert download(hub, tmp_path / "file")[0] == 700
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert starts(hub) == [600]


def test_a_partial_file_of_another_size_is_begun_anew(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "file.ranges").write_bytes(bytes(999))
    (tmp_path / "file.ranges-done").write_text("0\n")
    download(hub, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert starts(hub) == [0, 300, 600, 900]


def test_a_connection_that_breaks_goes_on_where_it_stopped(hub: LocalHub, tmp_path: Path) -> None:
    # In the last range: no other one is stopped.
    hub.stopped[NAME] = 950

    def repair() -> None:
        hub.is_stopped.wait()
        hub.stopped.clear()
        hub.goes_on.set()

    repairing = threading.Thread(target=repair)
    repairing.start()
    download(hub, tmp_path / "file")
    repairing.join()
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert starts(hub) == [0, 300, 600, 900, 950]


def test_a_server_without_ranges_is_left_to_others(hub: LocalHub, tmp_path: Path) -> None:
    hub.has_ranges = False
    with pytest.raises(NoRanges):
        download(hub, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_file_that_is_there_is_not_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of another process")
    assert download(hub, tmp_path / "file") == []
    assert starts(hub) == []


def test_content_with_another_hash_is_fetched_again_once(hub: LocalHub, tmp_path: Path) -> None:
    hub.damaged[NAME] = 1
    counts = download(hub, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert starts(hub) == [0, 0, 300, 300, 600, 600, 900, 900]
    assert -len(CONTENT) in counts
    assert sum(counts) == len(CONTENT)


def test_content_with_another_hash_twice_is_refused(hub: LocalHub, tmp_path: Path) -> None:
    hub.damaged[NAME] = 2
    with pytest.raises(WrongContent, match="allowed: " + etag(NAME, CONTENT)):
        download(hub, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    # Another try begins anew.
    download(hub, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_ranges_of_an_earlier_download_are_checked_too(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "file.ranges").write_bytes(bytes(len(CONTENT)))
    (tmp_path / "file.ranges-done").write_text("0\n300\n")
    download(hub, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert starts(hub) == [0, 300, 600, 600, 900, 900]


def test_a_file_of_git_is_checked_by_its_id(hub: LocalHub, tmp_path: Path) -> None:
    hub.files["large.json"] = CONTENT
    url = f"{hub.url}/{REPO}/resolve/{COMMIT}/large.json"
    digest = etag("large.json", CONTENT)
    RangedDownload(url, {}, len(CONTENT), digest, tmp_path / "file", lambda _: None).run()
    assert (tmp_path / "file").read_bytes() == CONTENT
    with pytest.raises(WrongContent):
        RangedDownload(url, {}, 1000, "0" * 40, tmp_path / "other", lambda _: None).run()
