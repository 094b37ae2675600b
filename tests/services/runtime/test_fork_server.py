"""Processes that a server of forks starts: their files, variables and ends, without their client
and without it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headwater.services.runtime import forked
from headwater.services.runtime.forked import UNKNOWN_STATUS, ForkClient, ForkedProcess, fork_server
from tests.polling import holds_within

MODULE = "program_of_a_fork"
SLEEP = "import time; time.sleep(600)"
PROBE = """import json, os, sys
facts = {
    "argv": sys.argv[1:],
    "has_module": "colorsys" in sys.modules,
    "variable": os.environ.get("HEADWATER_PROBE"),
    "files": {name: os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")},
    "group": os.getpgid(0),
    "shown": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:],
    "loop": __import__("asyncio").run(__import__("asyncio").sleep(0, "it runs")),
}
print(json.dumps(facts), flush=True)
raise SystemExit(7)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"}


@pytest.fixture
async def forks(environment: dict[str, str]) -> AsyncIterator[ForkClient]:
    with fork_server(
        ["colorsys", "no.such.module"], environment=environment, free_variables=["FREE"]
    ) as client:
        assert client is not None
        yield client


async def start(
    forks: ForkClient,
    code: str,
    folder: Path,
    environment: Mapping[str, str],
    *arguments: str,
    files: Mapping[int, int] | None = None,
) -> ForkedProcess | None:
    body = "".join(f"    {line}\n" for line in code.splitlines())
    (folder / f"{MODULE}.py").write_text(f"def main():\n{body}")
    return await forks.start(MODULE, arguments, environment=environment, files=files or {})


async def test_a_fork_has_its_arguments_variables_and_files_and_what_the_server_imported(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "other").open("w") as other:
        files = {1: out.fileno(), 2: out.fileno(), 4: other.fileno(), 3: out.fileno()}
        process = await start(
            forks,
            PROBE,
            tmp_path,
            environment | {"HEADWATER_PROBE": "set", "FREE": "1"},
            "-a",
            "b c",
            files=files,
        )
    assert process is not None
    assert await process.wait() == 7
    facts: dict[str, Any] = json.loads((tmp_path / "out").read_text())
    assert facts["argv"] == ["-a", "b c"]
    assert facts["has_module"]
    assert facts["variable"] == "set"
    assert facts["group"] == process.pid
    assert facts["shown"] == ["-m", MODULE, "-a", "b c"]
    assert facts["loop"] == "it runs"
    named = {
        number: Path(path).name for number, path in facts["files"].items() if "/proc/" not in path
    }
    assert named == {"0": "null", "1": "out", "2": "out", "3": "out", "4": "other"}
    with pytest.raises(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


async def test_nice_values_count_among_forks_and_others_of_the_session_that_started_them(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    first = await start(forks, SLEEP, tmp_path, environment)
    second = await start(forks, SLEEP, tmp_path, environment)
    assert first is not None
    assert second is not None
    assert os.getsid(first.pid) == os.getsid(second.pid) == os.getsid(0)
    first.kill()
    second.kill()
    await asyncio.gather(first.wait(), second.wait())


async def test_a_fork_finds_what_threads_of_imports_have_done(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    body = "import threading, time\ndone = []\n"
    body += (
        "def work():\n    time.sleep(0.5)\n    "
        "done.append(1)\nthreading.Thread(target=work).start()\n"
    )
    (tmp_path / "begins_a_thread.py").write_text(body)
    with fork_server(["begins_a_thread"], environment=environment) as client:
        assert client is not None
        code = "import begins_a_thread; raise SystemExit(len(begins_a_thread.done))"
        process = await start(client, code, tmp_path, environment)
        assert process is not None
        assert await process.wait() == 1


async def test_a_fork_ends_with_its_program_which_frees_nothing_one_by_one(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    code = "import atexit, sys\natexit.register(print, 'the end')\nprint('out')\nsys.exit('why')"
    with (tmp_path / "out").open("w") as out:
        files = {1: out.fileno(), 2: out.fileno()}
        process = await start(forks, code, tmp_path, environment, files=files)
        assert process is not None
        assert await process.wait() == 1
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["out", "why"]


async def test_a_fork_that_a_signal_ends_says_which(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    first = await start(forks, SLEEP, tmp_path, environment)
    second = await start(forks, SLEEP, tmp_path, environment)
    assert first is not None
    assert second is not None
    second.kill()
    first.send_signal(signal.SIGTERM)
    assert [await first.wait(), await second.wait()] == [-signal.SIGTERM, -signal.SIGKILL]


async def test_a_program_whose_libraries_would_read_other_variables_is_not_forked(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    assert await start(forks, SLEEP, tmp_path, environment | {"OMP_NUM_THREADS": "17"}) is None
    less = {name: value for name, value in environment.items() if name != "PATH"}
    assert await start(forks, SLEEP, tmp_path, less) is None


async def test_a_request_that_no_message_holds_is_for_a_new_interpreter(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    long = environment | {"HEADWATER_PROBE": "x" * (1 << 22)}
    assert await start(forks, SLEEP, tmp_path, long) is None
    process = await start(forks, "pass", tmp_path, environment)
    assert process is not None
    assert await process.wait() == 0


async def test_a_process_outlives_its_server_and_its_end_is_seen(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    process = await start(forks, SLEEP, tmp_path, environment)
    assert process is not None
    os.kill(_parent(process.pid), signal.SIGKILL)
    waiting = asyncio.ensure_future(process.wait())
    # Nothing more can be asked for, which is no error.
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while await start(forks, SLEEP, tmp_path, environment) is not None:
                pass
    assert not waiting.done()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await waiting == UNKNOWN_STATUS


async def test_a_process_that_its_client_does_not_wait_for_is_ended(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    starting = asyncio.ensure_future(start(forks, SLEEP, tmp_path, environment))
    # The request is sent, and the reply not read.
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    # Requests are answered in order.
    later = await start(forks, SLEEP, tmp_path, environment)
    assert later is not None
    assert await _comes_true(lambda: _children(_parent(later.pid)) == [later.pid])
    later.kill()
    await later.wait()


async def test_a_server_that_hangs_is_not_waited_for_and_leaves_no_process_when_it_goes_on(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(forks, SLEEP, tmp_path, environment)
    assert first is not None
    server = _parent(first.pid)
    monkeypatch.setattr(forked, "REPLY_SECONDS", 0.05)
    os.kill(server, signal.SIGSTOP)
    assert await start(forks, SLEEP, tmp_path, environment) is None
    os.kill(server, signal.SIGCONT)
    monkeypatch.undo()
    # Requests are answered in order.
    later = await start(forks, SLEEP, tmp_path, environment)
    assert later is not None
    assert await _comes_true(lambda: _children(server) == [first.pid, later.pid])
    for process in (first, later):
        process.kill()
        await process.wait()


async def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess\n"
        "from headwater.services.runtime.forked import fork_server\n"
        "with fork_server([], environment=os.environ):\n"
        "    [child] = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "    print(child, flush=True)\n"
        "    input()\n"
    )
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    server = int(await program.stdout.readline())
    assert await _comes_true(lambda: "fork_server" in Path(f"/proc/{server}/cmdline").read_text())
    # From here on the system ends it, or the end of its requests.
    program.kill()
    await program.wait()
    assert await _comes_true(lambda: not _runs(server))


async def test_without_pidfds_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with fork_server([], environment=os.environ) as client:
        assert client is None


async def _comes_true(condition: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(holds_within, condition, 60)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


STANDBY = "module_that_opens_a_device"
OPENS = """import os

opened = []
device = None

def main():
    global device
    opened.append(os.environ["FREE"])
    device = open(os.devnull)
"""
SAYS = """import json, os, sys
facts = {
    "pid": os.getpid(),
    "opened": getattr(sys.modules.get("module_that_opens_a_device"), "opened", None),
    "arguments": sys.argv[1:],
    "variable": os.environ.get("HEADWATER_PROBE"),
    "file": os.path.realpath("/proc/self/fd/20"),
}
if facts["opened"]:
    # What was opened meanwhile stays open.
    device = sys.modules["module_that_opens_a_device"].device
    assert os.path.realpath(f"/proc/self/fd/{device.fileno()}") == os.devnull
print(json.dumps(facts), flush=True)
raise SystemExit(3)
"""


async def test_the_next_program_of_its_environment_runs_in_the_process_that_stands_by(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / f"{STANDBY}.py").write_text(OPENS)
    own = environment | {"FREE": "gpu 0"}
    forks.stand_by(STANDBY, environment=own)
    # A second one of that environment is not forked.
    forks.stand_by(STANDBY, environment=own | {"HEADWATER_PROBE": "other"})

    async def facts_of(environment: Mapping[str, str]) -> dict[str, Any]:
        path = tmp_path / "facts"
        with path.open("w") as out:
            files = dict.fromkeys(range(1, 40), out.fileno())
            process = await start(forks, SAYS, tmp_path, environment, "-a", files=files)
        assert process is not None
        assert await process.wait() == 3, path.read_text()
        facts: dict[str, Any] = json.loads(path.read_text())
        assert facts.pop("pid") == process.pid
        return facts

    asked = {"arguments": ["-a"], "variable": "set", "file": str(tmp_path / "facts")}
    probe = {"HEADWATER_PROBE": "set"}
    elsewhere = await facts_of(environment | {"FREE": "gpu 1"} | probe)
    assert elsewhere == asked | {"opened": None}
    assert await facts_of(own | probe) == asked | {"opened": ["gpu 0"]}
    # It has become the program.
    assert await facts_of(own | probe) == asked | {"opened": None}


@pytest.mark.parametrize("fails", [True, False])
async def test_a_process_that_stands_by_and_dies_is_replaced_by_a_fork(
    forks: ForkClient, tmp_path: Path, environment: dict[str, str], fails: bool
) -> None:
    pid_file = tmp_path / "pid"
    write = f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    end = "raise SystemExit(1)" if fails else "pass"
    (tmp_path / f"{STANDBY}.py").write_text(
        f"import os, pathlib\ndef main():\n    {write}\n    {end}\n"
    )
    own = environment | {"FREE": "gpu 0"}
    forks.stand_by(STANDBY, environment=own)
    assert await asyncio.to_thread(holds_within, pid_file.is_file, 60)
    pid = int(pid_file.read_text())
    if not fails:
        os.kill(pid, signal.SIGKILL)
    assert await asyncio.to_thread(holds_within, lambda: not Path(f"/proc/{pid}").exists(), 60)
    process = await start(forks, "raise SystemExit(5)", tmp_path, own)
    assert process is not None
    assert await process.wait() == 5
    # Another one may stand by now.
    pid_file.unlink()
    forks.stand_by(STANDBY, environment=own)
    assert await asyncio.to_thread(holds_within, pid_file.is_file, 60)


async def test_a_process_that_stands_by_ends_with_the_server(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / f"{STANDBY}.py").write_text(
        f"import os, pathlib\ndef main():\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
    )
    with fork_server([], environment=environment) as forks:
        assert forks is not None
        forks.stand_by(STANDBY, environment=environment)
        assert await asyncio.to_thread(holds_within, pid_file.is_file, 60)
        ended = os.pidfd_open(int(pid_file.read_text()))
    assert (await asyncio.to_thread(select.select, [ended], [], [], 60))[0]
    os.close(ended)
