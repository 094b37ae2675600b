"""The commit that a process was made from, as git's own files say it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headwater.services.runtime import version
from headwater.services.runtime.process_facts import ProcessFacts

ME = ("-c", "user.name=t", "-c", "user.email=t@example.com")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", folder, *ME, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def test_the_commit_of_a_checkout_is_that_of_its_head(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")
    assert version.commit_of(checkout) == first
    git(checkout, "pack-refs", "--all")
    assert version.commit_of(checkout) == first
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "second")
    second = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert version.commit_of(tmp_path / "tree") == second != first
    git(checkout, "checkout", "-q", "--detach", second)
    assert version.commit_of(checkout) == second


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert version.commit_of(tmp_path) == ""
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert version.commit_of(tmp_path) == ""


def test_an_image_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(version.COMMIT_VARIABLE, "0123456789abcdef")
    version.commit.cache_clear()
    try:
        assert version.full_version() == f"{version.RELEASE}+012345678"
        family, *_ = ProcessFacts("engine").collect()
        assert family.samples[0].name == "headwater_build_info"
        assert family.samples[0].labels == {
            "stage": "engine",
            "version": version.RELEASE,
            "commit": "012345678",
        }
    finally:
        version.commit.cache_clear()
