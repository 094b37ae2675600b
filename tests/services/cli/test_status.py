from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headwater.services.cli.cluster_unreachable import BusUnreachable
from headwater.services.cli.status import as_json, as_table, ask_gateway, listen
from headwater.services.cli.status_watch import TokenRates, findings, watched
from headwater.services.runtime import bus as bus_module
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.cluster_key import make_token_file
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import (
    Kind,
    Member,
    ReplicaLoad,
    ServedAdapter,
    new_epoch,
)
from headwater.services.runtime.served_model import ServedModel
from headwater.services.stack.token_file import TOKEN, TOKEN_FILE
from tests.services.cli.test_cli import headwater

LOAD = ReplicaLoad(
    num_running=3,
    num_waiting=1,
    num_used_blocks=40,
    num_total_blocks=100,
    prefix_queries=200,
    prefix_hits=150,
    num_held_bytes=16_400_000_000,
)


async def listed(nats_url: str, member: Member) -> list[Member]:
    """Entries of the member, once it is listed. A single listing may miss a slow member."""
    async with asyncio.timeout(60):
        while not (
            found := [each for each in await listen(nats_url) if each.epoch == member.epoch]
        ):
            pass
    return found


async def test_every_process_with_a_heartbeat_is_in_the_table(
    nats_url: str, served_model: ServedModel
) -> None:
    engine = Member(
        kind=Kind.ENGINE,
        replica_id=served_model.name,
        epoch=new_epoch(),
        address="127.0.0.1:9",
        model=served_model,
        load=LOAD,
    )
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: engine):
        members = await listed(nats_url, engine)
    assert members == [engine]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(members))
    model, _, row = captured.get().splitlines()[:3]
    assert model.strip() == served_model.name
    assert row.split()[-9:-3] == ["3", "1", "40/100", "75%", "–", "serving"]
    assert row.endswith("(16.40 GB held)")
    (reported,) = as_json(members)
    assert (reported["kind"], reported["load"]["num_running"]) == ("engine", 3)


async def test_a_folder_of_a_cluster_that_has_ended_does_not_hide_another_one(
    nats_url: str, tmp_path: Path
) -> None:
    stage = Member(
        kind=Kind.PROCESSOR, replica_id="by-hand", epoch=new_epoch(), address="127.0.0.1:8"
    )
    make_token_file(tmp_path / TOKEN_FILE)
    asked = ("status", "--nats-url", nats_url, "--state-dir", str(tmp_path))
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: stage):
        names: list[str] = []
        async with asyncio.timeout(60):
            while stage.replica_id not in names:
                reported = await asyncio.to_thread(headwater, *asked, "--json", **{TOKEN: ""})
                names = [member["replica_id"] for member in json.loads(reported.stdout or "[]")]
        unheard = await asyncio.to_thread(
            headwater, *asked, **{TOKEN: "another-token-of-another-cluster"}
        )
    assert unheard.returncode == 1
    assert f"no stage is heard at {nats_url}; where stages have a token" in unheard.stderr


async def test_missing_services_of_a_gateway_are_in_its_row(nats_url: str) -> None:
    gateway = Member(
        kind=Kind.GATEWAY,
        replica_id="g",
        epoch=new_epoch(),
        address="127.0.0.1:8",
        without=("redis", "events"),
        rest_url="http://127.0.0.1:9",
    )
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: gateway):
        members = await listed(nats_url, gateway)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(members))
    first, second = (line.split() for line in captured.get().splitlines()[-2:])
    assert first == [
        "gateway",
        "g",
        "http://127.0.0.1:9",
        *["serving", "without", "redis,", "events"],
    ]
    assert second == ["127.0.0.1:8"]
    assert as_json(members)[0]["without"] == ("redis", "events")


async def test_a_bus_out_of_reach_is_named_and_so_is_a_missing_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_module, "OPEN_SECONDS", 0.1)
    with pytest.raises(
        BusUnreachable, match=r"no NATS server answers at nats://127\.0\.0\.1:1; is the cluster up"
    ):
        await listen("nats://127.0.0.1:1")
    assert await ask_gateway("http://127.0.0.1:1") == ""


def test_tokens_a_second_are_made_of_two_heartbeats(served_model: ServedModel) -> None:
    def beat(num_tokens: int) -> Member:
        load = ReplicaLoad(num_generated_tokens=num_tokens)
        return Member(
            kind=Kind.ENGINE, replica_id="e", epoch=1, address="a:1", model=served_model, load=load
        )

    rates = TokenRates()
    assert rates.of(beat(100), 10.0) is None
    assert rates.of(beat(150), 10.5) is None
    assert rates.of(beat(300), 12.0) == 100.0
    assert rates.of(beat(300), 12.5) == 100.0


def test_a_watcher_sees_heartbeats_beside_what_a_gateway_knows(served_model: ServedModel) -> None:
    engine = Member(
        kind=Kind.ENGINE, replica_id="e", epoch=1, address="a:1", model=served_model, load=LOAD
    )
    row = {"id": "e", "epoch": f"{1:016x}", "state": "failing", "trust": 0.5}
    row |= {"routed_tokens": 200, "predicted_tokens": 150, "cached_tokens": 100}
    totals = {"num_running": 3, "num_waiting": 1, "cached_tokens": 30, "prompt_tokens": 40}
    finding = {"level": "warning", "what": "e failed", "advice": "see its log"}
    snapshot = {"replicas": [row], "totals": totals, "event_lag": 0.012, "findings": [finding]}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(*watched([engine], TokenRates(), snapshot), findings(snapshot), sep="\n")
    first, _, model, _, cells, *_, last = (
        line.strip() for line in captured.get().rstrip().splitlines()
    )
    tiers = replace(
        LOAD,
        num_used_host_blocks=1,
        num_total_host_blocks=4,
        num_used_disk_bytes=30,
        num_total_disk_bytes=100,
    )
    assert first == "0 tokens/s, 3 running, 1 waiting, 75% of prompt tokens cached, index lag 12 ms"
    assert model == served_model.name
    assert cells.split() == ["e", "3", "1", "–", "40%", "75%", "50%", "of", "75%", "50%", "failing"]
    assert last == "e failed: see its log"
    with console.capture() as captured:
        console.print(*watched([replace(engine, load=tiers)], TokenRates(), None), sep="\n")
    assert captured.get().split()[-2:] == ["–", "serving"]
    assert "40% +25% disk 30%" in captured.get()


def test_adapters_of_engines_are_a_line_and_their_hashes_are_json(
    served_model: ServedModel,
) -> None:
    poet = ServedAdapter(name="", digest=b"p" * 16, rank=8)
    clerk = ServedAdapter(name="clerk", digest=b"c" * 16, rank=8)
    engine = Member(
        kind=Kind.ENGINE,
        replica_id="e",
        epoch=1,
        address="a:1",
        model=served_model,
        load=replace(LOAD, resident_adapters=(poet.digest,)),
        adapters=(poet, clerk),
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table([engine]))
    assert "adapters: e 2 (1 on device)" in captured.get()
    shown = json.loads(json.dumps(as_json([engine])))
    assert shown[0]["adapters"][0]["digest"] == shown[0]["load"]["resident_adapters"][0]
    with console.capture() as captured:
        console.print(as_table([replace(engine, adapters=())]))
    assert "adapters" not in captured.get()


def test_one_version_is_a_line_and_mixed_ones_are_listed_by_name() -> None:
    def sent(*versions: str) -> list[str]:
        members = [
            Member(kind=Kind.GATEWAY, replica_id=f"g{i}", epoch=1, address="a:1", version=each)
            for i, each in enumerate(versions)
        ]
        console = Console(width=200)
        with console.capture() as captured:
            console.print(as_table(members))
        return [line for line in captured.get().splitlines() if line.startswith("version")]

    assert sent("0.2.0+abc", "0.2.0+abc") == ["version 0.2.0+abc"]
    assert sent("0.2.0", "", "0.2.0") == ["version 0.2.0: g0, g2", "version unknown: g1"]
    assert sent("", "") == []
