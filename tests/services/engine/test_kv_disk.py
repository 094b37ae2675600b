"""Prefixes on a disk, through the engine service: what clients, metrics and the index hear, a
restart, a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto import engine_pb2 as pb
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime import cluster_key
from headwater.services.runtime.cluster_key import make_token_file, read_cluster_key
from headwater.services.runtime.settings import SettingError, read_settings
from tests.services.engine.engine_process import (
    Client,
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)
from tests.services.engine.test_kv_swap import metrics

BLOCK_SIZE = 16
PROMPT_LEN = 200
NUM_CACHED = 192
NUM_STORED = 208
"""Tokens of a block, of a prompt, of the prompt's whole blocks, and of the whole blocks of prompt
and answer."""
# Computing a block takes 80 ms, longer than reading one even if the machine paused while the disk
# was measured.
SMALL = ("--max-model-len=256", "--num-blocks=17", "--simulated-prefill-seconds=0.005")
ASKED = [prompt(seed, PROMPT_LEN) for seed in range(3)]


async def ask(client: Client, number: int, prompt_ids: list[int]) -> pb.Start:
    await client.send(add(number, prompt_ids, tenant="t:alice"))
    await client.read_until_finished(number)
    assert client.tokens[number] == answer(prompt_ids)
    return client.starts[number]


async def until(
    engine: EngineProcess, holds: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """The metrics once this holds of them."""
    for _ in range(1200):
        if holds(figures := await metrics(engine)):
            return figures
        await asyncio.sleep(0.05)
    raise AssertionError(figures)


async def until_stored(engine: EngineProcess, num_answers: int) -> None:
    """Returns when all blocks of so many answers have been written to the disk."""
    await until(
        engine,
        lambda figures: figures["headwater_kv_disk_out_tokens_total"] == num_answers * NUM_STORED,
    )


async def held(client: Client) -> set[bytes]:
    parts = [part async for part in client.stub.KvSnapshot(pb.KvSnapshotRequest())]
    return {block_hash for part in parts for block_hash in part.block_hashes}


async def until_held(client: Client, blocks: set[bytes]) -> None:
    for _ in range(1200):
        if blocks <= await held(client):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("blocks of the disk are not announced")


async def test_prefixes_survive_the_device_and_a_restart(tmp_path: Path) -> None:
    flags = (*SMALL, f"--kv-disk-dir={tmp_path / 'kv'}")
    with engine_process(*flags) as engine:
        async with client_of(engine) as client:
            for number, prompt_ids in enumerate(ASKED):
                start = await ask(client, number, prompt_ids)
                assert (start.cached_tokens, dict(start.cached_by_tier)) == (0, {})
            await until_stored(engine, 3)
            start = await ask(client, 4, ASKED[0])
            assert (start.cached_tokens, dict(start.cached_by_tier)) == (
                NUM_CACHED,
                {"disk": NUM_CACHED},
            )
            figures = await metrics(engine)
            assert figures["headwater_kv_disk_on"] == 1
            assert figures["headwater_kv_disk_in_tokens_total"] == NUM_CACHED
            assert 0 < figures["headwater_kv_disk_usage_perc"] < 1
            load = (await client.stub.Info(pb.InfoRequest())).load
            share = load.num_used_disk_bytes / load.num_total_disk_bytes
            assert share == pytest.approx(figures["headwater_kv_disk_usage_perc"])
    with engine_process(*flags) as engine:
        async with client_of(engine) as client:
            blocks = {
                each
                for prompt_ids in ASKED
                for each in block_hashes(bytes(16), prompt_ids, BLOCK_SIZE)
            }
            await until_held(client, blocks)
            start = await ask(client, 1, ASKED[1])
            assert (start.cached_tokens, dict(start.cached_by_tier)) == (
                NUM_CACHED,
                {"disk": NUM_CACHED},
            )


async def test_files_of_another_clusters_engine_are_deleted_at_the_start(tmp_path: Path) -> None:
    flags = (*SMALL, f"--kv-disk-dir={tmp_path / 'kv'}")
    token = tmp_path / "token"
    make_token_file(token)
    with engine_process(*flags) as engine:
        async with client_of(engine) as client:
            await ask(client, 1, ASKED[0])
            await until_stored(engine, 1)
    with (
        cluster_key.using(read_cluster_key("", str(token))),
        engine_process(*flags, f"--cluster-token-file={token}") as engine,
    ):
        async with client_of(engine) as client:
            start = await ask(client, 1, ASKED[0])
            assert (start.cached_tokens, dict(start.cached_by_tier)) == (0, {})
            # Not served, and not announced before it was found damaged either.
            figures = await metrics(engine)
            assert figures["headwater_kv_disk_damaged_blocks_total"] == 0


@pytest.mark.parametrize("fault", ["no folder", "deleted"])
async def test_an_engine_whose_disk_fails_goes_on_without_it_and_says_so(
    tmp_path: Path, fault: str
) -> None:
    root = tmp_path / "kv"
    with engine_process(*SMALL, f"--kv-disk-dir={root}") as engine:
        async with client_of(engine) as client:
            await ask(client, 1, ASKED[0])
            await until_stored(engine, 1)
            if fault == "deleted":
                root.rename(tmp_path / "away")
            else:
                # A disk that breaks: the namespace's folder is no folder any more.
                [folder] = [path.parent for path in root.glob("*/*/*/tenants")]
                folder.rename(tmp_path / "away")
                folder.write_bytes(b"")
            await ask(client, 2, ASKED[1])
            figures = await until(engine, lambda figures: figures["headwater_kv_disk_on"] == 0)
            assert figures["headwater_kv_disk_blocks"] == 0
            member = await client.stub.Info(pb.InfoRequest())
            assert list(member.without) == ["kv disk"]
            start = await ask(client, 3, ASKED[0])
            assert dict(start.cached_by_tier) == {}
        log = engine.close()
    assert "kv blocks on disk: it cannot be written to" in log


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--kv-disk-memory=4000",),
            "kv_disk_memory is 4000; allowed: 4096 bytes (a block) and more",
        ),
        ((), "allowed: a folder that the engine may write to"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    root = tmp_path / "kv"
    if not flags:
        root.write_bytes(b"")
    engine = EngineProcess(*SMALL, f"--kv-disk-dir={root}", *flags)
    assert engine.wait() != 0
    assert says in engine.close()


def test_no_room_is_refused_with_the_settings() -> None:
    with pytest.raises(SettingError, match="--kv-disk-memory is 0; allowed: 1 or more bytes"):
        read_settings(EngineSettings, ["--executor=simulated", "--kv-disk-memory=0"], env={})
