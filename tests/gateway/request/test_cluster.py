"""Connections to stages follow the membership."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.gateway.request.cluster import Cluster
from headwater.gateway.stages.output_sessions import OutputSessions
from headwater.gateway.stages.processors import Processors
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, Member, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel

ADDRESS = "127.0.0.1:1"


@pytest.mark.parametrize("kind", [Kind.PROCESSOR, Kind.OUTPUT_PROCESSOR])
async def test_a_connection_is_kept_while_one_member_has_its_address(kind: Kind, served_model: ServedModel) -> None:
    """A seed that introduces itself, then a process whose container was restarted: the dead one leaves later."""
    members, processors, outputs = Members(Bus(None), (kind,)), Processors(), OutputSessions()
    look_again = SimpleNamespace(look_again=lambda: None)
    stages = SimpleNamespace(members=members, processors=processors, outputs=outputs, cold_starts=look_again)
    members.on_change(lambda change: Cluster.follow(cast("Any", stages), change))
    seed = Member(kind=kind, replica_id=ADDRESS, epoch=0, address=ADDRESS)
    first = dataclasses.replace(seed, replica_id="first", epoch=new_epoch(), model=served_model)
    second = dataclasses.replace(first, replica_id="second", epoch=new_epoch())

    def connection() -> object:
        return (processors._pool if kind is Kind.PROCESSOR else outputs._sessions).get(ADDRESS)

    try:
        members.on_member(seed, from_bus=False)
        made = connection()
        assert made is not None
        for member in (first, second, dataclasses.replace(first, leaving=True)):
            members.on_member(member, from_bus=True)
            assert connection() is made
        members.on_member(dataclasses.replace(second, leaving=True), from_bus=True)
        assert connection() is None
    finally:
        await processors.close()
        await outputs.close()
