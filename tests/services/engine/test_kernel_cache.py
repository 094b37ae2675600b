"""Compiled kernels lie beside the models, or where they can."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.engine.kernel_cache import with_kernel_cache


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
    assert env["NUMBA_CACHE_DIR"] == env["TRITON_CACHE_DIR"] == str(tmp_path / "home/.cache/headwater/kernels")
