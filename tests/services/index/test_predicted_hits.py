"""What the index predicts of an engine whose layers see windows or keep states, beside what the
engine's requests find: the events and the columns are the engine's, over NATS and Valkey."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.index.column import Owner
from headwater.services.index.feed import IndexFeed
from headwater.services.index.reader import IndexReader
from headwater.services.index.writer import IndexWriter
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from tests.services.index.caching_engine import Engine as Door
from tests.services.index.caching_engine import eventually

BLOCK_SIZE = 16
VOCAB_SIZE = 1000
NUM_PROMPTS = 60


class Core:
    """An engine core that answers one request at a time."""

    def __init__(self, door: Door, **pages: Any) -> None:
        self._door = door
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_model_len=600,
            max_num_seqs=4,
            max_num_batched_tokens=96,
            **pages,
        )
        model = SimulatedModel(
            vocab_size=VOCAB_SIZE,
            windows=self.config.page_windows,
            num_state_units=num_units(self.config.state_pages),
        )
        self._engine = Engine(self.config, SimulatedExecutor(self.config, model))
        self._num_added = 0

    def answer(self, prompt: list[int]) -> int:
        """Computes an answer of a few tokens. Returns the tokens that were cached."""
        sampling = SamplingParams(max_tokens=5, seed=self._num_added)
        self._num_added += 1
        self._engine.add(
            NewRequest(key=self._num_added, prompt_ids=prompt, output_ids=[], sampling=sampling)
        )
        num_cached = 0
        while self._engine.has_work():
            if (output := self._engine.step()) is None:
                continue
            num_cached += sum(started.cached_tokens for started in output.starts)
            if output.cache_events is not None:
                self._door.log.note(output.cache_events)
        self._door.log.flush()
        return num_cached


def prompts() -> list[list[int]]:
    """Prompts that go on from earlier ones, or from a part of one."""
    rng = np.random.default_rng(0)
    found: list[list[int]] = []
    for number in range(NUM_PROMPTS):
        before = found[rng.integers(len(found))] if number % 5 else []
        shared = before if number % 2 else before[: rng.integers(len(before) + 1)]
        added = rng.integers(0, VOCAB_SIZE, rng.integers(10, 120)).tolist()
        found.append([*shared, *added][-560:] if not shared else [*shared, *added][:560])
    return found


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param({"num_blocks": 150}, id="all keys"),
        pytest.param({"num_blocks": 100, "page_windows": (60,)}, id="one window"),
        pytest.param({"num_blocks": 300, "page_windows": (0, 40, 40, 100)}, id="windows"),
        pytest.param({"num_blocks": 150, "state_pages": 4}, id="states"),
        pytest.param(
            {"num_blocks": 300, "page_windows": (0, 40), "state_pages": 4}, id="window and states"
        ),
    ],
)
async def test_what_the_index_predicts_is_what_a_prompt_finds(
    nats_url: str, redis_url: str, served_model: ServedModel, pages: dict[str, Any]
) -> None:
    door = Door(served_model)
    core = Core(door, **pages)
    blocks_seen = core.config.blocks_seen
    door.model = dataclasses.replace(
        served_model, blocks_seen=() if blocks_seen == (0,) else blocks_seen
    )
    async with (
        door.serving(),
        Bus.open(nats_url) as bus,
        Store.open(redis_url) as store,
        Store.open(None) as nowhere,
        IndexWriter(
            store,
            door.model,
            Owner(replica_id="a", epoch=door.epoch, address="here:1", capacity=1000),
        ).running() as writer,
    ):
        members = Members(bus, (Kind.ENGINE,))
        async with members.running(), IndexFeed(bus, members, nowhere).running() as feed:
            members.on_member(door.member, from_bus=True)
            index = feed.index(door.model.key)
            await eventually(lambda: feed.is_synced(door.member))
            reader = IndexReader(store, seconds=5.0)
            num_hits = 0
            num_leading = 0
            for prompt in prompts():
                # The last token is always computed.
                hashes = block_hashes(bytes(16), np.array(prompt[:-1], np.int32), BLOCK_SIZE)
                predicted = index.lookup(hashes).get("a", 0)
                in_redis = await reader.matched(door.model, hashes)
                assert in_redis.get(("a", door.epoch), 0) == predicted
                column = index.column("a")
                assert column is not None
                lost = (idx for idx, each in enumerate(hashes) if each not in column.stored)
                num_leading += next(lost, len(hashes))
                assert core.answer(prompt) == predicted * BLOCK_SIZE
                num_hits += predicted
                for batch in door.unpublished:
                    writer.apply(batch)
                await door.publish(bus)
                await eventually(
                    lambda: index.column("a").seq == door.log.seq  # type: ignore[union-attr]
                )
                await eventually(
                    lambda: all(
                        each.slot is not None and not each._pending for each in writer._columns
                    )
                )
            assert num_hits > 50
            # Leading blocks alone say something else.
            assert (num_leading == num_hits) == (blocks_seen == (0,))
