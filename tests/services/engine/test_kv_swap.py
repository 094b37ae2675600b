"""Host memory for prefixes, through the engine service: what clients, metrics and the prefix index
are told of it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator

import pytest

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto import engine_pb2 as pb
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)

BLOCK_SIZE = 16
PROMPT_LEN = 200
SMALL = ("--max-model-len=256", "--num-blocks=17")
ENTRY_BYTES = 8


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """Its device holds one prompt, host memory four."""
    with engine_process(*SMALL, f"--kv-swap-memory={4 * PROMPT_LEN * ENTRY_BYTES}") as engine:
        yield engine


async def test_a_prefix_that_left_the_device_is_still_offered_and_comes_back(
    engine: EngineProcess,
) -> None:
    asked = [prompt(seed, PROMPT_LEN) for seed in range(3)]
    async with client_of(engine) as client:
        for turn, prompt_ids in enumerate([*asked, asked[0]]):
            await client.send(add(turn, prompt_ids))
            await client.read_until_finished(turn)
        assert client.tokens == {turn: answer(asked[turn % 3]) for turn in range(4)}
        assert client.starts[3].cached_tokens == PROMPT_LEN // BLOCK_SIZE * BLOCK_SIZE
        parts = [part async for part in client.stub.KvSnapshot(pb.KvSnapshotRequest())]
        held = {block_hash for part in parts for block_hash in part.block_hashes}
    for prompt_ids in asked:
        assert held >= set(block_hashes(bytes(16), prompt_ids, BLOCK_SIZE))
    figures = await metrics(engine)
    assert figures["headwater_kv_swap_in_tokens_total"] > 0
    assert figures["headwater_kv_swap_out_tokens_total"] >= 3 * 192
    assert 0 < figures["headwater_kv_swap_usage_perc"] <= 1


async def metrics(engine: EngineProcess) -> dict[str, float]:
    url = f"http://{engine.addresses['metrics']}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in rows}


def test_less_than_a_block_is_refused() -> None:
    engine = EngineProcess(*SMALL, "--kv-swap-memory=100")
    assert engine.wait() != 0
    assert "kv_swap_memory is 100; allowed: 0, or 128 bytes (a block) and more" in engine.close()
