"""Compiled kernels lie beside the models, or where they can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.services.engine.core.kernel_cache import with_kernel_cache


def test_kernels_lie_beside_the_models_unless_the_environment_says_where(tmp_path: Path) -> None:
    env = with_kernel_cache({"HEADWATER_CACHE": str(tmp_path), "TRITON_CACHE_DIR": "/elsewhere"})
    assert env["NUMBA_CACHE_DIR"] == str(tmp_path / "kernels")
    assert env["TRITON_CACHE_DIR"] == "/elsewhere"
    assert (tmp_path / "kernels").is_dir()


def test_kernels_lie_in_the_home_where_the_models_folder_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "file").touch()
    env = with_kernel_cache({"HEADWATER_CACHE": str(tmp_path / "file")})
    assert (
        env["NUMBA_CACHE_DIR"]
        == env["TRITON_CACHE_DIR"]
        == str(tmp_path / "home/.cache/headwater/kernels")
    )


def test_installed_kernels_are_copied_unless_they_are_there(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    folder = tmp_path / "models/kernels"
    for name in ("new", "known"):
        (installed / name).mkdir(parents=True)
        (installed / name / "code").write_text("installed")
    (folder / "known").mkdir(parents=True)
    (folder / "known" / "code").write_text("own")
    with_kernel_cache({"HEADWATER_CACHE": str(tmp_path / "models")}, installed=installed)
    assert {path.name: (path / "code").read_text() for path in folder.iterdir()} == {
        "new": "installed",
        "known": "own",
    }


def test_without_installed_kernels_nothing_is_made_where_the_environment_says(
    tmp_path: Path,
) -> None:
    env = {"HEADWATER_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "elsewhere")}
    with_kernel_cache(env, installed=tmp_path / "none")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_kernels_of_cpus_are_compiled_without_a_model_and_only_once(tmp_path: Path) -> None:
    def compiled() -> set[str]:
        subprocess.run(
            [sys.executable, "-m", "headwater.services.cli", "warmup", "--device=cpu"],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            check=True,
            capture_output=True,
        )
        return {path.name for path in tmp_path.rglob("*.nbc")}

    first = compiled()
    assert {name.split(".")[0] for name in first} >= {
        "attention",
        "draw_candidates",
        "drafts",
        "suffix_match",
        "tile_kernel",
    }
    assert compiled() == first


def test_warmup_says_which_devices_it_knows() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "headwater.services.cli", "warmup", "--device=tpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 1
    assert output.stderr.strip() == "headwater: --device is 'tpu'; allowed: cuda or cpu"
