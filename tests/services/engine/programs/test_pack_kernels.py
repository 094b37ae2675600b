"""Kernels of a GPU in a wheel: what it holds, and that engines find them where pip puts them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.services.engine.core.kernel_cache import with_kernel_cache
from headwater.services.engine.programs.pack_kernels import packed
from headwater.services.runtime.settings import SettingError


def make_cache(folder: Path) -> Path:
    """A cache as Triton and Numba leave it."""
    kernel = folder / "KERNEL"
    kernel.mkdir(parents=True)
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    (kernel / "attention.json").write_text(json.dumps({"name": "attention", "target": target}))
    (kernel / "__grp__attention.json").write_text(json.dumps({"child_paths": {}}))
    (kernel / "attention.cubin").write_bytes(b"\x7fELF")
    (folder / "LAUNCHER").mkdir()
    (folder / "LAUNCHER" / "launcher.so").write_bytes(b"\x7fELF")
    for left_out in ("cpu_1a2b/rope.nbi", "step-costs/costs.bin", ".copying-1/attention.json"):
        (folder / left_out).parent.mkdir()
        (folder / left_out).write_bytes(b"{}")
    return folder


def test_an_installed_wheel_fills_the_cache_of_engines(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    wheel = packed(cache, tmp_path / "out")
    triton = importlib.metadata.version("triton").replace("+", ".")
    assert f"+cuda90.triton{triton}-py3-none-" in wheel.name
    assert [each.name for each in wheel.parent.iterdir()] == [wheel.name]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    prefix = tmp_path / "prefix"
    # pip compares what it unpacks with the hashes of the wheel's record.
    subprocess.run([*pip, f"--prefix={prefix}", str(wheel)], check=True)
    assert {each.name for each in (prefix / "kernels").iterdir()} == {"KERNEL", "LAUNCHER"}
    own = tmp_path / "models"
    with_kernel_cache({"HEADWATER_CACHE": str(own)}, installed=prefix / "kernels")
    assert (own / "kernels/KERNEL/attention.cubin").read_bytes() == b"\x7fELF"


def test_equal_kernels_make_an_equal_wheel(tmp_path: Path) -> None:
    wheels = [
        packed(make_cache(tmp_path / name), tmp_path / f"{name}-out").read_bytes()
        for name in ("a", "b")
    ]
    assert wheels[0] == wheels[1]


def test_a_folder_without_kernels_of_a_gpu_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(SettingError, match="allowed: a folder with compiled kernels of a GPU"):
            packed(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
