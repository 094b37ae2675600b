from __future__ import annotations

import pytest
from rich.console import Console

from headwater.services.cli.status import NobodyThere, as_json, as_table, ask_gateway, listen
from headwater.services.runtime import bus as bus_module
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.heartbeat import Heartbeat
from headwater.services.runtime.member import Kind, Member, ReplicaLoad, new_epoch
from headwater.services.runtime.served_model import ServedModel

LOAD = ReplicaLoad(
    num_running=3, num_waiting=1, num_used_blocks=40, num_total_blocks=100, prefix_queries=200, prefix_hits=150
)


async def test_everyone_who_beats_is_in_the_table(nats_url: str, served_model: ServedModel) -> None:
    engine = Member(
        kind=Kind.ENGINE,
        replica_id=served_model.name,
        epoch=new_epoch(),
        address="127.0.0.1:9",
        model=served_model,
        load=LOAD,
    )
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: engine):
        members = [each for each in await listen(nats_url) if each.replica_id == engine.replica_id]
    assert members == [engine]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(members))
    model, _, row = captured.get().splitlines()[:3]
    assert model.strip() == served_model.name
    assert row.split()[-6:] == ["3", "1", "40/100", "75%", "–", "serving"]
    (told,) = as_json(members)
    assert (told["kind"], told["load"]["num_running"]) == ("engine", 3)


async def test_what_a_gateway_goes_without_is_in_its_row(nats_url: str) -> None:
    gateway = Member(
        kind=Kind.GATEWAY,
        replica_id="g",
        epoch=new_epoch(),
        address="127.0.0.1:8",
        without=("redis", "events"),
        rest_url="http://127.0.0.1:9",
    )
    async with Bus.open(nats_url) as bus, Heartbeat.running(bus, lambda: gateway):
        members = [each for each in await listen(nats_url) if each.epoch == gateway.epoch]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(members))
    first, second = (line.split() for line in captured.get().splitlines()[-2:])
    assert first == ["gateway", "g", "http://127.0.0.1:9", *["serving", "without", "redis,", "events"]]
    assert second == ["127.0.0.1:8"]
    assert as_json(members)[0]["without"] == ("redis", "events")


async def test_a_bus_out_of_reach_is_named_and_so_is_a_gateway_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "OPEN_SECONDS", 0.1)
    with pytest.raises(NobodyThere, match=r"no NATS server answers at nats://127\.0\.0\.1:1; is the line up"):
        await listen("nats://127.0.0.1:1")
    assert await ask_gateway("http://127.0.0.1:1") == ""
