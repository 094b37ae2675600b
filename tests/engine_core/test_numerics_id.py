"""The numerics id changes with each source of the engine core and the kernels, the device, the
driver, libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from headwater.bench.workloads import TINY
from headwater.engine_core.platforms.numerics_id import (
    ROOMS,
    numerics_id,
    source_digest,
    source_files,
)
from headwater.kernels.launch.environment import Environment

H200 = Environment(
    device="H200", driver="570.124.06", libraries=(("torch", "2.9.0"), ("cublasLt", "12.8.4"))
)
KINDS = {
    "kernels": (
        "kernels/gemm/gemm.py",
        "kernels/attention/hopper_attention.py",
        "kernels/cpu/attention.py",
    ),
    "models": (
        "engine_core/models/decoder.py",
        "engine_core/weights/model_config.py",
        "engine_core/layers/rope.py",
    ),
    "platforms": ("engine_core/platforms/cuda.py", "engine_core/platforms/cpu.py"),
    "sampling": (
        "engine_core/sampling/sampler.py",
        "engine_core/executors/exit/device_sampler.py",
        "engine_core/sampling/pooling.py",
    ),
    "weights": (
        "engine_core/weights/model_file.py",
        "engine_core/weights/packed.py",
        "engine_core/weights/formats/gguf_file.py",
    ),
    "executors": (
        "engine_core/executors/step_executor.py",
        "engine_core/executors/build/request.py",
        "engine_core/executors/exit/eager_sample.py",
    ),
    "shapes": (
        "engine_core/executors/device/step_shapes.py",
        "engine_core/executors/table/batch.py",
        "engine_core/executors/device/cuda_graphs.py",
    ),
    "host memory": ("engine_core/executors/tiers/cuda_swapper.py", "engine_core/kv/host_blocks.py"),
}


@pytest.fixture
def rooms(tmp_path: Path) -> list[Path]:
    """Copies of the engine core and the kernels."""
    ignored = shutil.ignore_patterns("__pycache__")
    return [
        Path(shutil.copytree(room.resolve(), tmp_path / room.name, ignore=ignored))
        for room in ROOMS
    ]


def id_of(rooms: list[Path]) -> str:
    return numerics_id(H200, sources=source_digest(rooms))


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_any_source_changes_the_id(
    kind: str, rooms: list[Path], tmp_path: Path
) -> None:
    seen = {id_of(rooms)}
    for name in KINDS[kind]:
        path = tmp_path / name
        path.write_text(path.read_text() + "\n")
        seen.add(id_of(rooms))
    assert len(seen) == 1 + len(KINDS[kind])


def test_no_source_of_the_two_rooms_is_left_out(rooms: list[Path]) -> None:
    counted = {path for room in rooms for path in source_files(room)}
    assert counted == {path for room in rooms for path in room.rglob("*") if path.is_file()}


def test_files_that_come_go_or_swap_their_ends_change_the_id(
    rooms: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "kernels/tuned.json").write_text("{}")
    (tmp_path / "kernels/tuned.txt").write_text("")
    seen = {id_of(rooms)}
    (tmp_path / "kernels/tuned.json").rename(tmp_path / "kernels/tuned.jso")
    seen.add(id_of(rooms))
    (tmp_path / "kernels/tuned.jso").write_text("{")
    (tmp_path / "kernels/tuned.txt").write_text("}")
    seen.add(id_of(rooms))
    (tmp_path / "kernels/tuned.txt").unlink()
    seen.add(id_of(rooms))
    assert len(seen) == 4


def test_compiled_code_and_hidden_files_do_not_count(rooms: list[Path], tmp_path: Path) -> None:
    before = id_of(rooms)
    (tmp_path / "kernels/__pycache__").mkdir()
    (tmp_path / "kernels/__pycache__/gemm.pyc").write_bytes(b"code")
    (tmp_path / "kernels/.gemm.py.swp").write_bytes(b"draft")
    assert id_of(rooms) == before


@pytest.mark.parametrize("field", [field.name for field in fields(Environment)])
def test_another_device_driver_or_library_changes_the_id(field: str) -> None:
    others = {
        "device": "H100",
        "driver": "570.172.08",
        "libraries": (("torch", "2.9.0"), ("cublasLt", "12.8.5")),
    }
    other = replace(H200, **{field: others[field]})
    assert numerics_id(other, sources=b"") != numerics_id(H200, sources=b"")


def test_other_weights_change_the_id() -> None:
    assert (
        len(
            {
                numerics_id(H200, *what, sources=b"")
                for what in [(), ("a",), ("a", "bfloat16"), ("b", "bfloat16")]
            }
        )
        == 4
    )


def test_the_environment_of_a_cpu_names_the_libraries_that_compute_on_it() -> None:
    environment = Environment.of(torch.device("cpu"))
    libraries = dict(environment.libraries)
    for name in ("torch", "numpy", "numba", "llvmlite"):
        assert libraries[name] == metadata.version(name)
    assert torch.backends.cpu.get_cpu_capability() in environment.device


@pytest.mark.gpu
def test_the_environment_of_a_gpu_names_its_driver_and_the_libraries_of_products() -> None:
    environment = Environment.of(torch.device("cuda"))
    libraries = dict(environment.libraries)
    assert re.fullmatch(r"\d{3,}\.\d+(\.\d+)?|CUDA \d+", environment.driver)
    assert torch.cuda.get_device_name() in environment.device
    assert libraries["triton"] == metadata.version("triton")
    for name in ("cublas", "cublasLt"):
        assert re.fullmatch(r"\d+\.\d+\.\d+|part of torch", libraries[name])


BUILD = """
import sys
from pathlib import Path
from headwater.engine_core.sampling import sampler
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.kernels.cpu.compiler.compiled import Kernel

# Nothing is computed.
Kernel.compile = lambda *_: None

options = ExecutorOptions(
    model_folder=Path(sys.argv[1]), load_format="dummy", num_blocks=64, max_model_len=64
)
executor, _, facts = build_executor(options, lambda *_: None)
executor.close()
if sys.argv[2:] == ["change"]:
    source = Path(sampler.__file__)
    source.write_text(source.read_text() + "# another one\\n")
print(facts.numerics_id)
"""
"""Prints the id that an engine announces, and changes the sampler if it is asked to."""


@pytest.mark.long
def test_an_engine_announces_the_id_of_the_sources_that_it_runs(tmp_path: Path) -> None:
    for room in ROOMS:
        shutil.copytree(
            room.resolve(),
            tmp_path / "headwater" / room.name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ids = []
    for change in ([], ["change"], []):
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(tmp_path), *change],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        ids.append(done.stdout)
    first, again, other_sampler = ids
    assert first == again != other_sampler
