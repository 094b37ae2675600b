"""Real servers for every test: NATS and Valkey from the embedded wheels, or those that the
environment names."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

# Kernels are interpreted where there is no GPU; Triton decides so when it decorates a function.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Tests start hundreds of processes: their modules are compiled once, whatever an image sets for
# those that start once.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# Threads of several processes share few cores here; one that spins at a barrier keeps another from
# reaching its own.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A processor would start a second process, which few tests ask anything.
os.environ.setdefault("HEADWATER_WARM_GRAMMARS", "false")

import hypothesis
import pytest
import pytest_asyncio
import structlog
from redis.asyncio import Redis

from headwater.bench.pytest_health import ProcessHealth
from headwater.bench.pytest_locks import LockHealth
from headwater.bench.text_folder import demo_text_folder
from headwater.services.engine.core.kernel_cache import with_kernel_cache
from headwater.services.engine.core.variables import COSTS_VARIABLE
from headwater.services.runtime import bus, channel
from headwater.services.runtime.kept_child import keeper_command
from headwater.services.runtime.served_model import ServedModel
from headwater.services.stack import embedded
from headwater.services.stack.embedded import start_nats, start_valkey
from tests import stage_log, workers
from tests.browser.chromium import MISSING, Chromium, find_chromium
from tests.free_ports import free_port

# Files of keys that tests write are for them alone, as those of operators have to be.
os.umask(0o027)
# A machine that is busy with other things may take longer to connect, and tests publish what is to
# be heard.
bus.OPEN_SECONDS = 60.0
# A process that waits for a core or for memory answers no ping, and is not gone.
channel.PONG_SECONDS = 60.0
# A server that is started again finds its port free: no other worker was given it meanwhile.
embedded._free_port = free_port
# jsonschema would compile 38 grammars of international identifiers, a second in each worker. No
# test has that format.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# Kernels for CPUs are compiled once for the engines that tests start and for those in the tests'
# own processes.
os.environ["NUMBA_CACHE_DIR"] = with_kernel_cache(os.environ)["NUMBA_CACHE_DIR"]

# An example may take any time on a busy machine.
RANDOM = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("random", RANDOM)
hypothesis.settings.register_profile("repeated", RANDOM, derandomize=True)

JS = Path(__file__).parent / "gateway" / "js"


def pytest_configure(config: pytest.Config) -> None:
    # `make test` tries the same examples each time: a rare fault fails a change that has nothing to
    # do with it, and is gone the next time. `make test-long` tries others.
    is_short = "not long" in config.getoption("markexpr")
    hypothesis.settings.load_profile("repeated" if is_short else "random")
    config.pluginmanager.register(ProcessHealth(config))
    config.pluginmanager.register(LockHealth())
    config.pluginmanager.register(workers.SharedFixtures())
    workers.compile_once(config)


def pytest_runtest_setup() -> None:
    # A program that ran in a test before has set a level for the whole process.
    structlog.reset_defaults()
    stage_log.mark_all()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Imported modules and tests stay until the end: full collections find no garbage among them,
    # and took a third of the time of collecting the tests (2026-11-26), later half a second each
    # (2026-11-22).
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    workers.longest_first(items)
    done = yield
    # Behind the selection by marks.
    workers.deal_gpu_tests(config, items)
    return done


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    workers.send_how_tests_are_shared(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Whoever asks for another way to share tests out, as the GPU's suite does, gets it.
    return workers.by_group(config, log) if config.option.dist == "load" else None


def pytest_make_parametrize_id(val: object) -> str | None:
    """Of a function its name: what it is otherwise called has an address in it, and differs between
    workers."""
    return getattr(val, "__name__", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the processes said that a failed test had to do with."""
    report = yield
    if report.failed:
        report.sections += stage_log.sections()
    return report


@pytest.fixture(scope="session")
def kept() -> Iterator[dict[str, Any]]:
    """Arguments that tie a server to this process: it ends even when the test run is killed."""
    watched, held = os.pipe()
    yield {"launcher": keeper_command(pipe=watched, limit=2.0), "pass_fds": [watched]}
    os.close(held)
    os.close(watched)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_url(
    tmp_path_factory: pytest.TempPathFactory, kept: dict[str, Any]
) -> AsyncIterator[str]:
    """A NATS server that the whole test run shares; subjects of a test carry names of its own."""
    if url := os.environ.get("HEADWATER_NATS_URL"):
        yield url
        return
    folder = tmp_path_factory.mktemp("nats")
    server = await start_nats(folder, jetstream=folder / "streams", **kept)
    yield server.url
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_redis_url(
    tmp_path_factory: pytest.TempPathFactory, kept: dict[str, Any]
) -> AsyncIterator[str]:
    """The server behind `redis_url`."""
    if url := os.environ.get("HEADWATER_REDIS_URL"):
        yield url
        return
    server = await start_valkey(tmp_path_factory.mktemp("valkey"), **kept)
    yield server.url
    await server.stop()


@pytest_asyncio.fixture
async def redis_url(shared_redis_url: str) -> AsyncIterator[str]:
    """A Redis that is empty at the start of each test; one that the environment names is left as it
    is."""
    if "HEADWATER_REDIS_URL" not in os.environ:
        async with Redis.from_url(shared_redis_url) as client:
            await client.flushall()
    yield shared_redis_url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_url(
    tmp_path_factory: pytest.TempPathFactory, kept: dict[str, Any]
) -> AsyncIterator[str]:
    """A cluster of one node, which refuses commands whose keys lie in different hash slots."""
    server = await start_valkey(tmp_path_factory.mktemp("valkey-cluster"), cluster=True, **kept)
    yield server.url
    await server.stop()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_costs(run_folder: Path) -> None:
    """What steps cost while tests keep all cores busy is no measure for the engines of later runs,
    or of the user."""
    os.environ[COSTS_VARIABLE] = str(run_folder / "step-costs")


@pytest.fixture(scope="session")
def demo_folder(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer and chat template; no weights. The workers of a run share it: it
    takes seconds to read the tokenizer from the model's file."""
    folder = run_folder / "demo-text"
    with (run_folder / "demo-text.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            demo_text_folder(tmp_path_factory.mktemp("demo-text")).rename(folder)
    return folder


@pytest.fixture
def free_dir(tmp_path: Path) -> Path:
    """An empty folder for servers and stages that a test starts itself."""
    folder = tmp_path / "servers"
    folder.mkdir()
    return folder


@pytest.fixture
def served_model() -> ServedModel:
    """A served model whose name, and so whose key, no other test has."""
    return ServedModel(
        name=f"test/{uuid.uuid4().hex}",
        revision="r1",
        dtype="float32",
        block_size=16,
        kv_format="float32",
        max_model_len=8192,
        vocab_size=49152,
    )


@pytest.fixture(scope="session")
def js_folder() -> Path:
    """The JavaScript clients with what their lock file names."""
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    lock = JS / "package-lock.json"
    installed = JS / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        command = ["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"]
        subprocess.run(command, cwd=JS, check=True, capture_output=True, timeout=120)
        installed.touch()
    return JS


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests; each opens pages that share nothing."""
    program = find_chromium()
    if program is None:
        pytest.skip(MISSING)
    with Chromium.running(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
