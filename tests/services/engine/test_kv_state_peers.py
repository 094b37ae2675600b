"""Snapshots of states between engines, through their services: pulled with the blocks before them,
and the death of either side."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from headwater.services.models.manifest import LAYOUT, ModelManifest
from tests.engine_core.small_models import convert, random_checkpoint
from tests.services.engine.engine_process import add
from tests.services.engine.test_kv_disk import until
from tests.services.engine.test_kv_peers import Peer, peer
from tests.services.text.small_tokenizers import byte_level

PROMPT_LEN = 200
NUM_CACHED = 192
PROMPTS = [[3 + (seed * 131 + i * i * 7 + i) % 200 for i in range(PROMPT_LEN)] for seed in range(6)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Those of a model with states, whose pages the simulated executor has."""
    home = tmp_path_factory.mktemp("states")
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    random_checkpoint("qwen3.5", home / "hf", vocab_size=size)
    folder = convert(home / "hf", home / "ours")
    tokenizer.save(str(folder / "tokenizer.json"))
    ModelManifest(
        name="states",
        revision="1",
        dtype="float32",
        layout=LAYOUT,
        architecture="Qwen3_5ForCausalLM",
        vocab_size=size,
        max_model_len=512,
        eos_token_ids=(size - 2,),
        bos_token_id=None,
        source="random numbers",
    ).write(folder)
    return f"--model-folder={folder}", "--max-model-len=512", "--simulated-prefill-seconds=0.003"


async def ask(peer: Peer, number: int, prompt_ids: Sequence[int], **fields: Any) -> list[int]:
    await peer.client.send(add(number, prompt_ids, **fields))
    await peer.client.read_until_finished(number)
    return peer.client.tokens[number]


@pytest.mark.long
async def test_a_snapshot_is_pulled_with_the_blocks_before_it(flags: tuple[str, ...]) -> None:
    for way in ("auto", "off"):
        async with peer(*flags) as owner, peer(*flags, f"--kv-peer-direct={way}") as puller:
            known = await ask(owner, 1, PROMPTS[0])
            assert await ask(puller, 1, PROMPTS[0], holder=owner.holds()) == known
            start = puller.client.starts[1]
            assert start.cached_tokens == NUM_CACHED
            assert dict(start.cached_by_tier) == {"peer": NUM_CACHED}
            await owner.until_metric("kv_lent_tokens_total", NUM_CACHED)


@pytest.mark.long
async def test_when_the_owner_of_snapshots_is_killed_the_rest_is_computed(
    flags: tuple[str, ...],
) -> None:
    async with peer(*flags) as owner, peer(*flags) as puller:
        known = [await ask(owner, 1 + i, each) for i, each in enumerate(PROMPTS)]
        client = puller.client
        adds = [add(10 + i, each, holder=owner.holds()) for i, each in enumerate(PROMPTS)]
        await client.send(*adds)
        os.kill(owner.engine.pid, signal.SIGKILL)
        await client.read_until_finished(*(each.stream_ids[0] for each in adds))
        assert [client.tokens[each.stream_ids[0]] for each in adds] == known
        await until(puller.engine, lambda figures: figures["headwater_kv_cache_usage_perc"] == 0)


@pytest.mark.long
async def test_leases_of_snapshots_end_with_the_engine_that_pulls_them(
    flags: tuple[str, ...],
) -> None:
    async with peer(*flags) as owner:
        known = [await ask(owner, 1 + i, each) for i, each in enumerate(PROMPTS)]
        async with peer(*flags) as puller:
            adds = [add(10 + i, each, holder=owner.holds()) for i, each in enumerate(PROMPTS)]
            await puller.client.send(*adds)
            await puller.client.read_tokens(10, 1)
            os.kill(puller.engine.pid, signal.SIGKILL)
            await owner.until_metric("kv_leases", 0)
        await until(owner.engine, lambda figures: figures["headwater_kv_cache_usage_perc"] == 0)
        assert [await ask(owner, 20 + i, each) for i, each in enumerate(PROMPTS)] == known
