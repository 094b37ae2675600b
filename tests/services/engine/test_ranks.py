"""Engines of several ranks through the engine service: answers, metrics, what is refused, and the
death of a rank."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from pathlib import Path

import grpc
import pytest

from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import Sampling
from tests.chatting_model import make_chatting_model
from tests.gateway.processes import launched
from tests.services.engine.engine_process import (
    Client,
    EngineProcess,
    add,
    client_of,
    engine_process,
    undrafted,
    wait_for_end,
)
from tests.services.engine.test_kv_swap import metrics

SMALL = (
    "--executor=single",
    "--device=cpu",
    "--max-model-len=512",
    "--num-blocks=100",
    "--max-num-seqs=8",
)
TWO = ("--tensor-parallel-size=2", "--threads=2")
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("served"))


def ranks_of(engine: EngineProcess) -> list[int]:
    """Process ids, in the order of the ranks."""
    core = engine.core_pid
    return [int(pid) for pid in Path(f"/proc/{core}/task/{core}/children").read_text().split()]


async def rank_metrics(engine: EngineProcess) -> dict[tuple[str, int], float]:
    """By name and rank."""
    url = f"http://{engine.addresses['metrics']}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    found = re.findall(r'^headwater_rank_(\w+)_total{.*rank="(\d+)"} (\S+)$', text, re.MULTILINE)
    return {(name, int(rank)): float(value) for name, rank, value in found}


async def one_more(engine: EngineProcess, choice: int) -> None:
    """Has one token computed."""
    async with client_of(engine) as client:
        await client.send(add(choice, PROMPT, 1))
        await client.read_until_finished(choice)
        await client.idle_load()


@pytest.mark.long
async def test_an_engine_answers_in_two_ranks_as_in_one_process(folder: Path) -> None:
    reported = []
    sampled = Sampling(temperature=0.8, seed=3, max_tokens=40, top_p=0.9)
    for flags in ((), TWO):
        with engine_process(f"--model-folder={folder}", *SMALL, *flags, start=launched) as engine:
            async with client_of(engine) as client:
                await client.send(add(1, PROMPT, 40), add(2, PROMPT[::-1], 40, sampling=sampled))
                await client.read_until_finished(1, 2)
                await client.idle_load()
            reported.append((client.tokens[1], client.tokens[2]))
            figures = await rank_metrics(engine)
            # What is read was counted at some step: another one may find both ranks at rest.
            for i in range(3, 23):
                if not flags or figures["plans", 0] == figures["plans", 1]:
                    break
                await one_more(engine, i)
                figures = await rank_metrics(engine)
    assert reported[0] == reported[1]
    assert len(reported[0][0]) == 40
    assert figures["plans", 0] == figures["plans", 1] >= 40
    assert 0 < figures["wait_seconds", 1] < figures["busy_seconds", 1]


@pytest.mark.long
async def test_engines_of_two_ranks_pull_blocks_from_each_other(folder: Path) -> None:
    flags = (f"--model-folder={folder}", *SMALL, *TWO, f"--kv-peer-memory={32 << 20}")
    prompt_ids = [20 + i * i % 200 for i in range(400)]
    with (
        engine_process(*flags, start=launched) as owner,
        engine_process(*flags, start=launched) as puller,
    ):
        async with client_of(owner) as first, client_of(puller) as second:
            await first.send(add(1, prompt_ids, 20))
            await first.read_until_finished(1)
            info = await first.stub.Info(pb.InfoRequest())
            holder = pb.Holder(
                address=owner.address, epoch=info.incarnation.epoch, num_tokens=len(prompt_ids)
            )
            await second.send(add(1, prompt_ids, 20, holder=holder))
            await second.read_until_finished(1)
            assert second.tokens[1] == first.tokens[1] != []
            assert dict(second.starts[1].cached_by_tier) == {"peer": 384}
        figures = await metrics(puller)
        assert figures["headwater_kv_pulled_tokens_total"] == 384
        assert figures["headwater_kv_pulled_directly_tokens_total"] == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--tensor-parallel-size=3", "--threads=3"),
            "tensor_parallel_size is 3; allowed: 1 or 2, which divide",
        ),
        (("--tensor-parallel-size=0",), "tensor-parallel-size is 0; allowed: 1 or more"),
        (
            ("--tensor-parallel-size=2", "--executor=simulated"),
            "allowed: 1 with executor simulated",
        ),
    ],
    ids=["heads", "none", "simulated"],
)
def test_what_ranks_cannot_be_is_refused_in_one_line(
    folder: Path, flags: tuple[str, ...], sentence: str
) -> None:
    engine = EngineProcess(f"--model-folder={folder}", *SMALL, *flags)
    assert engine.wait() != 0
    assert sentence in engine.close()


def long_answers() -> list[pb.Add]:
    """More requests than run at once, without drafts, so that some still run when the test
    interrupts them."""
    return [
        add(i, [i * 7 + j % 90 for j in range(30)], 450, sampling=undrafted(450))
        for i in range(1, 33)
    ]


async def read_all(client: Client) -> None:
    """Never returns: the session's end raises."""
    async with asyncio.timeout(60):
        while True:
            await client.read()


@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("idle", 1),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("prefill", 0), ("prefill", 1), ("decode", 0))
        ),
        ("decode", 1),
    ],
)
async def test_a_rank_that_is_killed_ends_the_engine_and_every_other_rank(
    folder: Path, rank: int, moment: str
) -> None:
    with engine_process(f"--model-folder={folder}", *SMALL, *TWO) as engine:
        pids = ranks_of(engine)
        async with client_of(engine) as client:
            if moment == "prefill":
                await client.send(
                    *(add(i, [i * 7 + j % 90 for j in range(400)], 60) for i in range(1, 9))
                )
            elif moment == "decode":
                await client.send(*long_answers())
                await client.read_tokens(1, 3)
            else:
                await client.idle_load()
            os.kill(pids[rank], signal.SIGKILL)
            await asyncio.to_thread(wait_for_end, engine.core_pid, 120)
            if moment != "idle":
                with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
                    await read_all(client)
        for pid in pids:
            wait_for_end(pid, 60)
        assert engine.wait() != 0
        output = engine.close()
    assert f"rank {rank} was ended by SIGKILL; all ranks of the engine end" in output


async def test_a_rank_that_stands_still_ends_the_engine(folder: Path) -> None:
    with engine_process(f"--model-folder={folder}", *SMALL, *TWO) as engine:
        pids = ranks_of(engine)
        async with client_of(engine) as client:
            await client.send(*long_answers())
            await client.read_tokens(1, 5)
            os.kill(pids[1], signal.SIGSTOP)
            await asyncio.to_thread(wait_for_end, engine.core_pid, 120)
        for pid in pids:
            wait_for_end(pid, 60)
        assert engine.wait() != 0
        output = engine.close()
    found = re.search(
        r"rank 1 .*has computed no plan for ([\d.]+) s; all ranks of the engine end", output
    )
    assert found is not None
    assert float(found[1]) >= 2.0


async def test_ranks_end_with_their_core_and_with_their_engine(folder: Path) -> None:
    for strike in ("core", "engine"):
        with engine_process(f"--model-folder={folder}", *SMALL, *TWO) as engine:
            pids = ranks_of(engine)
            if strike == "core":
                os.kill(engine.core_pid, signal.SIGKILL)
            else:
                engine.terminate()
            for pid in pids:
                wait_for_end(pid, 60)
            engine.wait()
