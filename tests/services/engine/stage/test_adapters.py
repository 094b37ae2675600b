"""Adapters of an engine over gRPC, with the simulated executor."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb
from headwater.services.engine.core.messages import (
    AdapterDropped,
    AdapterRead,
    Command,
    ReadAdapter,
)
from headwater.services.engine.stage import adapters as engine_adapters
from headwater.services.engine.stage.adapters import EVICT_SECONDS, EngineAdapters
from headwater.services.runtime.errors import Unavailable
from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.services.engine.engine_process import (
    MODEL,
    EngineProcess,
    add,
    client_of,
    engine_process,
    prompt,
)

ERROR = common_pb2.FINISH_REASON_ERROR


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("clerk", "poet")):
        write_adapter(base / name, tensors_of(i, num_layers=1))
    return base


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    modules = f"--lora-modules=clerk={folder / 'clerk'}"
    with engine_process("--threads=1", "--adapter-memory=16", modules) as engine:
        yield engine


async def test_a_checked_adapter_answers_by_its_hash_and_is_dropped_when_it_is_unloaded(
    engine: EngineProcess, folder: Path
) -> None:
    async with client_of(engine) as client:
        checked = await client.stub.CheckAdapter(pb.CheckAdapterRequest(folder=f"{folder}/poet"))
        await client.send(add(1, prompt(1), 9, adapter=checked.digest))
        await client.read_until_finished(1)
        greedy = SamplingParams(temperature=0.0, max_tokens=9)
        assert client.tokens[1] == expected_tokens(MODEL, prompt(1), greedy, adapter=checked.digest)
        shown = (await client.stub.Info(pb.InfoRequest())).adapters
        assert [(each.name, each.rank) for each in shown] == [("clerk", 4), ("", 4)]
        shown_load = (await client.stub.Info(pb.InfoRequest())).load
        assert list(shown_load.resident_adapters) == [checked.digest]
        again = pb.CheckAdapterRequest(folder="/nowhere", digest=checked.digest)
        assert (await client.stub.CheckAdapter(again)).rank == 4
        await client.stub.UnloadAdapter(pb.UnloadAdapterRequest(digest=checked.digest))
        while len((await client.stub.Info(pb.InfoRequest())).adapters) > 1:
            pass
        await client.send(add(2, prompt(1), 9, adapter=checked.digest))
        await client.read_until_finished(2)
    assert client.finishes[2].reason == ERROR
    assert client.finishes[2].retriable


def parts_of(folder: Path, digest: bytes = b"", piece: int = 1000) -> Iterator[pb.AdapterPart]:
    """Messages that send an adapter's files."""
    config = (folder / "adapter_config.json").read_bytes()
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    yield pb.AdapterPart(num_config_bytes=len(config), num_tensor_bytes=len(tensors), digest=digest)
    data = config + tensors
    for at in range(0, len(data), piece):
        yield pb.AdapterPart(data=data[at : at + piece])


async def test_an_adapter_that_is_sent_is_the_one_that_lies_in_a_folder(
    engine: EngineProcess, folder: Path
) -> None:
    async with client_of(engine) as client:
        poet = folder / "poet"
        sent = await client.stub.SendAdapter(parts_of(poet))
        assert sent == await client.stub.CheckAdapter(pb.CheckAdapterRequest(folder=str(poet)))
        await client.stub.UnloadAdapter(pb.UnloadAdapterRequest(digest=sent.digest))
        whole = list(parts_of(poet))
        huge = pb.AdapterPart(num_config_bytes=1 << 30, num_tensor_bytes=1)
        for parts, words in (
            (whole[:-1], "that were announced"),
            ([*whole, whole[-1]], "that were announced"),
            ([], "num_config_bytes"),
            ([huge], "num_config_bytes"),
            (list(parts_of(folder / "clerk", sent.digest)), "allowed: " + sent.digest.hex()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.SendAdapter(iter(parts))
            assert words in (refused.value.details() or "")


async def test_the_least_recently_used_leave_host_memory_and_are_read_again(
    folder: Path, tmp_path: Path
) -> None:
    size = (folder / "poet" / "adapter_model.safetensors").stat().st_size
    places = [write_adapter(tmp_path / str(i), tensors_of(10 + i, num_layers=1)) for i in range(4)]
    room = f"--adapter-host-memory={3 * size}"
    modules = f"--lora-modules=clerk={folder / 'clerk'}"
    with engine_process("--threads=1", "--adapter-memory=16", room, modules) as engine:
        async with client_of(engine) as client:
            checked: list[pb.CheckAdapterReply] = []

            async def evicted() -> list[int]:
                info = await client.stub.Info(pb.InfoRequest())
                leaving = {each.digest for each in info.adapters if each.is_evicted}
                return [i for i, each in enumerate(checked) if each.digest in leaving]

            async def read(i: int) -> pb.CheckAdapterReply:
                digest = checked[i].digest if i < len(checked) else b""
                request = pb.CheckAdapterRequest(folder=str(places[i]), digest=digest)
                return await client.stub.CheckAdapter(request)

            async def answers(stream_id: int, i: int) -> None:
                await client.send(add(stream_id, prompt(1), 9, adapter=checked[i].digest))
                await client.read_until_finished(stream_id)

            # The adapter with a name of the engine stays: there is room for two others.
            for i in (0, 1):
                checked.append(await read(i))
            await answers(1, 0)
            checked.append(await read(2))
            assert await evicted() == [1]
            # Gateways may not know yet: the request keeps its adapter, and another one leaves.
            await answers(2, 1)
            assert client.finishes[2].reason != ERROR
            assert await evicted() == [0]
            assert await read(0) == checked[0]
            assert await evicted() == [2]
            await answers(3, 0)
            greedy = SamplingParams(temperature=0.0, max_tokens=9)
            expected = expected_tokens(MODEL, prompt(1), greedy, adapter=checked[0].digest)
            assert client.tokens[3] == expected
            await asyncio.sleep(1.2 * EVICT_SECONDS)
            # One that has left is refused, for the gateway to have it read again.
            await answers(4, 2)
            assert client.finishes[4].retriable
            # The next readings: one goes beyond the bound, one waits until the memory is within it.
            assert await read(2) == checked[2]
            begin = time.monotonic()
            checked.append(await read(3))
            assert time.monotonic() - begin > EVICT_SECONDS / 2
            address = f"http://{engine.addresses['metrics']}/metrics"
            metrics = (await asyncio.to_thread(httpx.get, address)).text
            shown = dict(re.findall(r"^headwater_(adapter_\w+){.*} (.+)$", metrics, re.MULTILINE))
            assert shown["adapter_evictions_total"] == "2.0"
            assert shown["adapter_host_bytes"] == f"{4.0 * size}"
            # One that does not fit beside the engine's own is refused.
            big = write_adapter(tmp_path / "big", tensors_of(20, num_layers=3))
            with pytest.raises(grpc.aio.AioRpcError, match="allowed: adapter_host_memory"):
                await client.stub.CheckAdapter(pb.CheckAdapterRequest(folder=str(big)))
            await client.send(add(5, prompt(1), 4))
            await client.read_until_finished(5)
            assert len(client.tokens[5]) == 4


async def test_a_load_is_refused_while_running_requests_keep_all_of_the_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The core reports nothing as dropped: requests have every adapter."""
    monkeypatch.setattr(engine_adapters, "EVICT_SECONDS", 0.0)
    monkeypatch.setattr(engine_adapters, "ROOM_SECONDS", 0.05)
    sent: list[Command] = []
    adapters = EngineAdapters(sent.append, max_bytes=100)

    async def read(digest: bytes) -> AdapterRead:
        loading = asyncio.ensure_future(adapters.check("/folder", digest=digest))
        await asyncio.sleep(0)
        if sent and isinstance(sent[-1], ReadAdapter):
            adapters.on_report(AdapterRead(sent[-1].number, digest, 8, 60))
        return await loading

    await read(b"one")
    await read(b"two")
    assert adapters.num_bytes == 120
    with pytest.raises(Unavailable, match=r"take 120 bytes .* allowed: adapter_host"):
        await read(b"three")
    assert not adapters.has(b"one")
    adapters.on_report(AdapterDropped(b"one"))
    assert adapters.num_bytes == 60
    await read(b"three")
    assert [each.digest for each in adapters.shown if each.is_evicted] == [b"one", b"two"]


async def test_what_is_no_adapter_is_refused_and_the_engine_goes_on(
    engine: EngineProcess, tmp_path: Path
) -> None:
    async with client_of(engine) as client:
        for request, words in (
            (pb.CheckAdapterRequest(folder=str(tmp_path)), "without adapter_config.json"),
            (pb.CheckAdapterRequest(folder="/x\0y"), "without adapter_config.json"),
            (
                pb.CheckAdapterRequest(folder=str(tmp_path), within="/adapters"),
                "allowed: a folder in /adapters",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.CheckAdapter(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (refused.value.details() or "")
        await client.send(add(1, prompt(2), 3))
        await client.read_until_finished(1)
    assert len(client.tokens[1]) == 3


def test_a_module_that_is_no_adapter_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    with engine_process("--adapter-memory=16", f"--lora-modules=x={tmp_path}") as engine:
        assert engine.wait() == 1
        log = engine.close()
    assert "--lora-modules is" in log
    assert "without adapter_config.json" in log
