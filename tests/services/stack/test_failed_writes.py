"""A NATS whose disk was full stores again when there is room, without a person."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from headwater.services.runtime.tasks import owned_task
from headwater.services.stack import failed_writes
from headwater.services.stack.embedded import start_nats
from headwater.services.stack.failed_writes import ServerLog, restart_after_failed_writes
from headwater.services.stack.stage_process import Child, KeptStage, ServerProcess

DISK_BYTES = 2 << 20
FAILED = "[ERR] JetStream failed to store a msg: write 1.blk: no space left on device\n"


def test_a_log_tells_of_each_failure_once_also_after_a_new_one_was_begun(tmp_path: Path) -> None:
    log = tmp_path / "nats.log"
    log.write_text("[INF] Server is ready\n")
    lines = ServerLog(log)
    assert not lines.has_new_fault()
    with log.open("a") as file:
        file.write(FAILED)
    assert [lines.has_new_fault(), lines.has_new_fault()] == [True, False]
    log.write_text(FAILED)
    assert lines.has_new_fault()


class Server:
    """A server that runs until it is stopped."""

    children = ()
    pid = 1

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def ready(self) -> dict[str, str]:
        return {}

    async def ended(self) -> int:
        await self.stopped.wait()
        return 0

    async def stop(self, limit: float, hurry: asyncio.Event) -> None:
        self.stopped.set()


@pytest.mark.parametrize("lacking", ["LEAST_ROOM", "LEAST_FILES"])
async def test_a_server_with_a_failed_write_is_started_again_once_when_its_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """A disk without room for files has the same fault as one without room for bytes."""
    monkeypatch.setattr(failed_writes, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(failed_writes, lacking, 1 << 62, raising=False)
    log = tmp_path / "nats.log"
    log.write_text(FAILED)
    lives = list[Server]()
    is_back = asyncio.Event()

    async def start() -> Child:
        lives.append(Server())
        if len(lives) == 2:
            is_back.set()
        return lives[-1]

    kept = KeptStage("nats", start, lambda _: None)
    await kept.begin()
    said = list[str]()
    async with (
        owned_task(kept.keep()),
        owned_task(restart_after_failed_writes(kept, log, tmp_path, said.append)),
    ):
        await asyncio.sleep(0.05)
        assert said == [], "the disk is still full"
        monkeypatch.setattr(failed_writes, lacking, 1)
        async with asyncio.timeout(60):
            await is_back.wait()
        await asyncio.sleep(0.05)
    assert len(lives) == 2
    assert said == ["nats could not write to its disk, which has room again; it is started again"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """A folder that is a disk of two MiB inside a mount namespace, and what starts a program
    there."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {folder} && echo mounted && exec cat"
    holder = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip("this system has no mount namespaces for its users")
        enter = ("nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials")
        yield folder, enter
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


async def write_on(js: JetStreamContext) -> None:
    while True:
        await js.publish("kept", bytes(16_384))


@pytest.mark.long
async def test_nats_stores_again_when_its_full_disk_has_room(
    free_dir: Path, small_disk: tuple[Path, Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_writes, "CHECK_SECONDS", 0.1)
    folder, inside = small_disk

    async def start() -> Child:
        port = int(kept.addresses.get("port", 0))
        return ServerProcess(
            await start_nats(free_dir, port=port, jetstream=folder / "js", launcher=inside)
        )

    def run(command: str) -> None:
        subprocess.run([*inside, "sh", "-c", command], check=False, stderr=subprocess.DEVNULL)

    kept = KeptStage("nats", start, lambda _: None)
    await kept.begin()
    client = await nats.connect(kept.addresses["url"], reconnect_time_wait=0.1)
    try:
        js = client.jetstream(timeout=1)
        await js.add_stream(StreamConfig(name="kept", subjects=["kept"]))
        await js.publish("kept", b"first")
        run(f"head -c {DISK_BYTES} /dev/zero > {folder}/full")
        with pytest.raises(nats.errors.Error):
            await write_on(js)
        run(f"rm {folder}/full")
        with pytest.raises(nats.errors.Error):
            await js.publish("kept", b"refused although there is room")
        async with (
            owned_task(kept.keep()),
            owned_task(
                restart_after_failed_writes(kept, free_dir / "nats.log", folder, lambda _: None)
            ),
            asyncio.timeout(60),
        ):
            while True:
                try:
                    await js.publish("kept", b"second")
                    break
                except nats.errors.Error:
                    await asyncio.sleep(0.1)
        assert (await js.get_msg("kept", seq=1)).data == b"first"
    finally:
        await client.close()
        await kept.stop(5, asyncio.Event())
