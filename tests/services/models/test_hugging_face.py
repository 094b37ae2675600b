"""Downloads from a Hub on this machine: what a killed one leaves, and the progress of bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.services.models.hugging_face import LARGE_BYTES
from tests.services.models.local_hub import COMMIT, REPO, LocalHub, etag

PULL = f"""
from pathlib import Path
import sys
from headwater.services.models import hugging_face
from headwater.services.models.hugging_face import snapshot
from headwater.services.runtime.progress import report_line
hugging_face.LARGE_BYTES = int(sys.argv[2])
print(snapshot({REPO!r}, revision=None, cache_dir=Path(sys.argv[1]), progress=report_line))
"""


def pulling(hub: LocalHub, cache: Path, large_bytes: int = LARGE_BYTES) -> subprocess.Popen[str]:
    env = {name: each for name, each in os.environ.items() if not name.startswith("HF_")}
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(cache), str(large_bytes)],
        env=env | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_a_download_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    content = os.urandom(72 << 20)
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": content}
    with LocalHub(files).served() as hub:
        # The last range of five stays open.
        hub.stopped["model.safetensors"] = 70 << 20
        first = pulling(hub, tmp_path)
        assert hub.is_stopped.wait(60)
        journal = (
            tmp_path
            / "downloads/hub/models--owner--name/blobs"
            / (etag("model.safetensors", content) + ".ranges-done")
        )
        deadline = time.monotonic() + 60
        while not journal.exists() or len(journal.read_text().split()) < 4:
            assert time.monotonic() < deadline, "ranges did not come"
            time.sleep(0.05)
        first.kill()
        first.communicate()
        hub.stopped.clear()
        hub.ranges.clear()
        second = pulling(hub, tmp_path)
        printed, _ = second.communicate(timeout=100)
    assert second.returncode == 0
    *lines, folder = printed.splitlines()
    assert Path(folder).name == COMMIT
    assert (Path(folder) / "model.safetensors").read_bytes() == content
    assert [each for each in hub.ranges if each[0] == "model.safetensors"] == [
        ("model.safetensors", 64 << 20)
    ]
    progress = [json.loads(line) for line in lines]
    assert (progress[0]["done"], progress[0]["total"]) == (64 << 20, 72 << 20)
    assert not journal.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_damaged", "xet_hash", "num_downloads"), [(0, "5" * 64, 1), (1, "", 2), (2, "", 2)]
)
def test_a_file_is_checked_against_the_hash_that_the_hub_publishes(
    tmp_path: Path, num_damaged: int, xet_hash: str, num_downloads: int
) -> None:
    """Also one in Xet storage, where its library is turned off."""
    content = os.urandom(1000)
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": content}
    with LocalHub(files).served() as hub:
        hub.damaged["model.safetensors"] = num_damaged
        hub.xet_hash = xet_hash
        pull = pulling(hub, tmp_path, large_bytes=100)
        printed, problem = pull.communicate(timeout=100)
    assert [name for name, _ in hub.ranges].count("model.safetensors") == num_downloads
    if num_damaged < 2:
        assert pull.returncode == 0, problem
        assert (Path(printed.splitlines()[-1]) / "model.safetensors").read_bytes() == content
    else:
        assert "a file of 'owner/name' was damaged on its way, twice: " in problem
        assert not list(tmp_path.rglob("model.safetensors"))
