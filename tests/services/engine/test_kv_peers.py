"""Blocks between engines, through their services: what is pulled, what is not, and what becomes of
leases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal, kv_key
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto import blocks_pb2, blocks_pb2_grpc
from headwater.proto import engine_pb2 as pb
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime import cluster_key
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.cluster_key import Purpose, make_token_file, read_cluster_key
from headwater.services.runtime.settings import SettingError, read_settings
from tests.long_values import long_but
from tests.services.engine.engine_process import (
    VOCAB_SIZE,
    Client,
    EngineProcess,
    add,
    answer,
    engine_process,
    prompt,
)
from tests.services.engine.test_kv_disk import held, until
from tests.services.engine.test_kv_swap import metrics

BLOCK_SIZE = 16
PROMPT_LEN = 200
NUM_CACHED = 192
FLAGS = ("--kv-peer-memory=65536", "--simulated-prefill-seconds=0.001")
ASKED = [prompt(seed, PROMPT_LEN) for seed in range(8)]


class Peer:
    """An engine and a client of it."""

    def __init__(self, engine: EngineProcess, client: Client, epoch: int) -> None:
        self.engine = engine
        self.client = client
        self.epoch = epoch
        self._num_asked = 0

    def holds(self, num_tokens: int = PROMPT_LEN) -> pb.Holder:
        return pb.Holder(address=self.engine.address, epoch=self.epoch, num_tokens=num_tokens)

    async def ask(self, prompt_ids: list[int], **fields: Any) -> pb.Start:
        self._num_asked += 1
        await self.client.send(add(self._num_asked, prompt_ids, **fields))
        await self.client.read_until_finished(self._num_asked)
        assert (
            self.client.tokens[self._num_asked]
            == answer(prompt_ids)[len(fields.get("output_ids", ())) :]
        )
        return self.client.starts[self._num_asked]

    async def metric(self, name: str) -> float:
        return (await metrics(self.engine))[f"headwater_{name}"]

    async def until_metric(self, name: str, value: float) -> None:
        """Returns when the metric has the value. A lender learns later than the puller that a pull
        is over."""
        await until(self.engine, lambda figures: figures[f"headwater_{name}"] == value)


@contextlib.asynccontextmanager
async def peer(*flags: str) -> AsyncIterator[Peer]:
    with engine_process(*FLAGS, *flags) as engine:
        # With the proofs of the scope's token, if there is one.
        async with open_channel(engine.address) as channel:
            client = Client(channel)
            try:
                info = await client.stub.Info(pb.InfoRequest())
                yield Peer(engine, client, info.incarnation.epoch)
            finally:
                client.call.cancel()


def tiers(start: pb.Start) -> dict[str, int]:
    return dict(start.cached_by_tier)


@pytest.mark.parametrize("way", long_but(["auto", "off"], "auto"))
async def test_an_engine_pulls_what_another_one_has_and_answers_the_same(way: str) -> None:
    async with peer() as owner, peer(f"--kv-peer-direct={way}") as puller:
        await owner.ask(ASKED[0])
        start = await puller.ask(ASKED[0], holder=owner.holds())
        assert (start.cached_tokens, tiers(start)) == (NUM_CACHED, {"peer": NUM_CACHED})
        # From now on they are its own.
        start = await puller.ask(ASKED[0], holder=owner.holds())
        assert (start.cached_tokens, tiers(start)) == (NUM_CACHED, {})
        assert await puller.metric("kv_pulled_tokens_total") == NUM_CACHED
        assert await puller.metric("kv_pulled_directly_tokens_total") == (
            NUM_CACHED if way == "auto" else 0
        )
        await owner.until_metric("kv_lent_tokens_total", NUM_CACHED)
        assert await held(puller.client) >= set(block_hashes(bytes(16), ASKED[0], BLOCK_SIZE))


@pytest.mark.long
async def test_requests_of_one_prompt_pull_it_once() -> None:
    async with peer() as owner, peer() as puller:
        await owner.ask(ASKED[0])
        client = puller.client
        await client.send(*(add(number, ASKED[0], holder=owner.holds()) for number in range(1, 9)))
        await client.read_until_finished(*range(1, 9))
        assert all(client.tokens[number] == answer(ASKED[0]) for number in range(1, 9))
        assert all(client.starts[number].cached_tokens == NUM_CACHED for number in range(1, 9))
        await owner.until_metric("kv_lent_tokens_total", NUM_CACHED)
        assert await puller.metric("kv_pulled_tokens_total") == NUM_CACHED


@pytest.mark.parametrize("tier", long_but(("host", "disk"), "disk"))
async def test_an_engine_lends_what_left_its_cache_for_another_tier(
    tier: str, tmp_path: Path
) -> None:
    behind = "--kv-swap-memory=1000000" if tier == "host" else f"--kv-disk-dir={tmp_path}"
    async with (
        peer("--num-blocks=21", "--max-model-len=300", behind) as owner,
        peer("--max-model-len=300") as puller,
    ):
        for prompt_ids in ASKED[:3]:
            await owner.ask(prompt_ids)
        if tier == "disk":
            await until(
                owner.engine,
                lambda figures: figures["headwater_kv_disk_out_tokens_total"] >= 3 * NUM_CACHED,
            )
        start = await puller.ask(ASKED[0], holder=owner.holds())
        assert (start.cached_tokens, tiers(start)) == (NUM_CACHED, {"peer": NUM_CACHED})
        await owner.until_metric("kv_lent_from_tiers_tokens_total", NUM_CACHED)


async def test_only_what_is_there_is_pulled_and_the_rest_is_computed() -> None:
    async with peer() as owner, peer() as puller:
        await owner.ask(ASKED[0][:100])
        start = await puller.ask(ASKED[0], holder=owner.holds())
        assert (start.cached_tokens, tiers(start)) == (96, {"peer": 96})
        assert (
            await puller.metric("kv_pull_discarded_blocks_total") == (NUM_CACHED - 96) / BLOCK_SIZE
        )


@pytest.mark.parametrize(
    ("other", "holder"),
    [
        (("--block-size=32",), {}),
        pytest.param(("--kv-peer-memory=0",), {}, marks=pytest.mark.long),
        pytest.param((), {"epoch": 5}, marks=pytest.mark.long),
        ((), {"address": "127.0.0.1:9"}),
        pytest.param((), {"num_tokens": 0}, marks=pytest.mark.long),
    ],
    ids=[
        "another layout",
        "an engine that lends nothing",
        "another incarnation",
        "nobody there",
        "no tokens",
    ],
)
async def test_what_does_not_fit_is_computed(
    other: tuple[str, ...], holder: dict[str, Any]
) -> None:
    async with peer(*other) as owner, peer() as puller:
        await owner.ask(ASKED[0])
        wrong = owner.holds()
        wrong.MergeFrom(pb.Holder(**holder))
        if holder == {"num_tokens": 0}:
            wrong.ClearField("num_tokens")
        start = await puller.ask(ASKED[0], holder=wrong)
        assert (start.cached_tokens, tiers(start)) == (0, {})


async def test_an_engine_without_the_memory_takes_no_notice_of_the_advice() -> None:
    async with peer() as owner, peer("--kv-peer-memory=0") as puller:
        await owner.ask(ASKED[0])
        assert (await puller.ask(ASKED[0], holder=owner.holds())).cached_tokens == 0


@pytest.mark.long
async def test_a_resumed_answer_pulls_prompt_and_output() -> None:
    async with peer() as owner, peer() as puller:
        known = answer(ASKED[0], 40)
        await owner.client.send(add(99, ASKED[0], 40))
        await owner.client.read_until_finished(99)
        client = puller.client
        num_known = PROMPT_LEN + 24
        fields = {
            "output_ids": known[:24],
            "num_output_tokens": 24,
            "holder": owner.holds(num_known),
        }
        await client.send(add(1, ASKED[0], 40, **fields))
        client.tokens[1] = known[:24]
        await client.read_until_finished(1)
        assert client.tokens[1] == known
        assert (
            await puller.metric("kv_pulled_tokens_total")
            == (num_known - 1) // BLOCK_SIZE * BLOCK_SIZE
        )


async def test_pulls_that_are_slower_than_computing_are_not_made() -> None:
    async with peer() as owner, peer("--simulated-prefill-seconds=0.0000000001") as puller:
        await owner.ask(ASKED[0])
        assert (await puller.ask(ASKED[0], holder=owner.holds())).cached_tokens == 0


@pytest.mark.parametrize("number", long_but((signal.SIGKILL, signal.SIGSTOP), signal.SIGKILL))
async def test_when_the_owner_is_gone_or_hangs_the_rest_is_computed(number: signal.Signals) -> None:
    async with peer() as owner, peer() as puller:
        for prompt_ids in ASKED:
            await owner.ask(prompt_ids)
        client = puller.client
        await puller.ask(ASKED[0], holder=owner.holds())
        os.kill(owner.engine.pid, number)
        try:
            asked = range(10, 10 + len(ASKED))
            await client.send(
                *(add(10 + i, each, holder=owner.holds()) for i, each in enumerate(ASKED))
            )
            await client.read_until_finished(*asked)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.engine.pid, signal.SIGCONT)
        assert all(client.tokens[10 + i] == answer(each) for i, each in enumerate(ASKED))


class Stranger:
    """A client of the plane that does what no engine does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = blocks_pb2_grpc.BlocksStub(channel).Pull()

    async def pull(self, owner: Peer, number: int, key: bytes) -> None:
        hashes = block_hashes(bytes(16), ASKED[0], BLOCK_SIZE)[:2]
        pull = blocks_pb2.Pull(
            pull_id=number, epoch=owner.epoch, key=key, namespace=bytes(16), block_hashes=hashes
        )
        await self.call.write(blocks_pb2.PullFrame(pulls=[pull]))

    async def answer(self) -> list[blocks_pb2.BlockFrame]:
        frames: list[blocks_pb2.BlockFrame] = []
        while not (frames and frames[-1].HasField("after")):
            frames.append(await asyncio.wait_for(self.call.read(), 60))
        return frames


async def test_another_key_is_lent_nothing() -> None:
    async with peer() as owner, grpc.aio.insecure_channel(owner.engine.address) as channel:
        await owner.ask(ASKED[0])
        stranger = Stranger(channel)
        await stranger.pull(owner, 1, b"k" * 16)
        [frame] = await stranger.answer()
        assert (list(frame.before.block_hashes), list(frame.after.block_hashes)) == ([], [])
        await stranger.pull(owner, 2, kv_key("simulated", BLOCK_SIZE, 8 * BLOCK_SIZE, VOCAB_SIZE))
        frames = await stranger.answer()
        assert frames[0].before == frames[-1].after
        assert len(frames[0].before.block_hashes) == 2


async def test_records_that_are_sent_are_sealed_by_the_clusters_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    make_token_file(token)
    key = read_cluster_key("", str(token))
    assert key is not None
    with cluster_key.using(key):
        async with peer(f"--cluster-token-file={token}") as owner:
            await owner.ask(ASKED[0])
            async with open_channel(owner.engine.address) as channel:
                stranger = Stranger(channel)
                kv = kv_key("simulated", BLOCK_SIZE, 8 * BLOCK_SIZE, VOCAB_SIZE)
                await stranger.pull(owner, 1, kv)
                records = b"".join(frame.records for frame in await stranger.answer())
    header = records[:HEADER_LEN]
    payload = records[HEADER_LEN : HEADER_LEN + 8 * BLOCK_SIZE]
    asked = kv, bytes(16), block_hashes(bytes(16), ASKED[0], BLOCK_SIZE)[0]
    assert BlockSeal(key.keys(Purpose.BLOCK)).is_block(header, payload, *asked)
    assert not BlockSeal().is_block(header, payload, *asked)
    assert not BlockSeal(key.keys(Purpose.RECORD)).is_block(header, payload, *asked)


@pytest.mark.long
async def test_leases_end_within_five_seconds_of_a_silent_puller() -> None:
    """It asks for more than is sent while it reads nothing, and says nothing more."""
    async with peer(
        "--kv-peer-memory=4194304", "--block-size=128", "--max-model-len=4096"
    ) as owner:
        long = prompt(3, 4000)
        await owner.client.send(add(99, long, 1))
        await owner.client.read_until_finished(99)
        async with grpc.aio.insecure_channel(owner.engine.address) as channel:
            call: Any = blocks_pb2_grpc.BlocksStub(channel).Pull()
            hashes = block_hashes(bytes(16), long, 128)
            key = kv_key("simulated", 128, 1024, VOCAB_SIZE)
            for first in range(1, 600, 60):
                pulls = [
                    blocks_pb2.Pull(
                        pull_id=number,
                        epoch=owner.epoch,
                        key=key,
                        namespace=bytes(16),
                        block_hashes=hashes[:16],
                    )
                    for number in range(first, first + 60)
                ]
                await call.write(blocks_pb2.PullFrame(pulls=pulls))
            await until(owner.engine, lambda figures: figures["headwater_kv_leases"] > 0)
            async with asyncio.timeout(5.5):
                await until(owner.engine, lambda figures: figures["headwater_kv_leases"] == 0)
            call.cancel()
        # What was lent is there for others.
        await owner.ask(ASKED[1])


async def test_only_engines_of_the_cluster_are_lent_anything(tmp_path: Path) -> None:
    token = tmp_path / "token"
    make_token_file(token)
    flag = f"--cluster-token-file={token}"
    with cluster_key.using(read_cluster_key("", str(token))):
        async with peer(flag) as owner, peer(flag) as puller, peer() as stranger:
            await owner.ask(ASKED[0])
            assert tiers(await puller.ask(ASKED[0], holder=owner.holds())) == {"peer": NUM_CACHED}
            assert tiers(await stranger.ask(ASKED[0], holder=owner.holds())) == {}
            async with grpc.aio.insecure_channel(owner.engine.address) as channel:
                call: Any = blocks_pb2_grpc.BlocksStub(channel).Pull()
                with pytest.raises(grpc.aio.AioRpcError, match="needs the cluster's token"):
                    await call.read()


def test_too_little_memory_is_refused_at_the_start() -> None:
    engine = EngineProcess("--kv-peer-memory=100")
    assert engine.wait() != 0
    assert (
        "kv_peer_memory is 100; allowed: 0, or 512 bytes (2 blocks, twice) and more"
        in engine.close()
    )
    with pytest.raises(SettingError, match="--kv-peer-memory is -1; allowed: 0 or more bytes"):
        read_settings(EngineSettings, ["--executor=simulated", "--kv-peer-memory=-1"], env={})


def prefetch_of(
    owner: Peer, puller: Peer, prompt_ids: list[int], **fields: Any
) -> pb.PrefetchRequest:
    request = pb.PrefetchRequest(
        epoch=puller.epoch,
        holder=owner.holds(len(prompt_ids)),
        block_hashes=b"".join(block_hashes(bytes(16), prompt_ids, BLOCK_SIZE)),
        cache_namespace=bytes(16),
        limit_ms=30_000,
        chunk_blocks=4,
    )
    request.MergeFrom(pb.PrefetchRequest(**fields))
    return request


async def test_blocks_are_prefetched_while_the_other_engine_computes_and_the_request_finds_them() -> (
    None
):
    long = prompt(50, 800)
    chunks = ("--max-num-batched-tokens=64", "--max-num-seqs=8")
    # Computing the prompt takes seconds, so that one of the following reads of the metrics falls
    # into that time.
    async with peer(*chunks, "--simulated-prefill-seconds=0.005") as owner, peer(*chunks) as puller:
        call = puller.client.stub.Prefetch()
        await call.write(prefetch_of(owner, puller, long))
        asked = asyncio.ensure_future(owner.ask(long))
        await until(
            puller.engine, lambda figures: figures["headwater_kv_prefetched_tokens_total"] >= 128
        )
        assert not asked.done()
        await asked
        # At the first token only the last chunks were missing; they come without a request.
        await until(
            puller.engine, lambda figures: figures["headwater_kv_prefetched_tokens_total"] == 800
        )
        call.cancel()
        start = await puller.ask(long, holder=owner.holds())
        assert (start.cached_tokens, tiers(start)) == (784, {"peer": 784})
        assert await puller.metric("kv_pulled_tokens_total") == 800
        await owner.until_metric("kv_leases", 0)


async def test_a_prefetch_ends_with_its_call_and_a_wrong_one_is_refused() -> None:
    async with peer() as owner, peer() as puller:
        for fields, code in (
            ({"epoch": 5}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"block_hashes": b"short"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"cache_namespace": b"short"}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            call = puller.client.stub.Prefetch()
            await call.write(prefetch_of(owner, puller, ASKED[0], **fields))
            assert await call.code() == code
        call = puller.client.stub.Prefetch()
        await call.write(prefetch_of(owner, puller, ASKED[0]))
        # Its end is heard before the prompt is computed: nothing is pulled any more.
        await asyncio.sleep(0.2)
        await call.done_writing()
        await call
        await owner.ask(ASKED[0])
        await asyncio.sleep(1.5)
        assert await puller.metric("kv_pulled_tokens_total") == 0


async def test_a_prefetch_whose_holder_dies_leaves_nothing_behind() -> None:
    long = prompt(51, 800)
    async with peer("--max-num-batched-tokens=64", "--max-num-seqs=8") as owner, peer() as puller:
        call = puller.client.stub.Prefetch()
        await call.write(prefetch_of(owner, puller, long))
        asked = asyncio.ensure_future(owner.client.send(add(1, long)))
        await until(
            puller.engine, lambda figures: figures["headwater_kv_prefetched_tokens_total"] >= 64
        )
        os.kill(owner.engine.process.pid, signal.SIGKILL)
        await asked
        await until(puller.engine, lambda figures: figures["headwater_kv_cache_usage_perc"] == 0)
        start = await puller.ask(long, holder=owner.holds())
        assert start.cached_tokens >= 64
        call.cancel()
