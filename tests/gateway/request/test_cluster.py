"""Connections to stages follow the membership."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.gateway.request.cluster import Cluster
from headwater.gateway.request.served_models import ServedModels
from headwater.gateway.stages.output_sessions import OutputSessions
from headwater.gateway.stages.processors import Processor, Processors
from headwater.gateway.stages.stages import Stages
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import NotFound, Unavailable
from headwater.services.runtime.member import Kind, Member, new_epoch
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel, model_key

ADDRESS = "127.0.0.1:1"


@pytest.mark.parametrize("kind", [Kind.PROCESSOR, Kind.OUTPUT_PROCESSOR])
async def test_a_connection_is_kept_while_one_member_has_its_address(
    kind: Kind, served_model: ServedModel
) -> None:
    """A seed introduces itself. Then its container restarts, and the dead process leaves after the
    new one joined."""
    members = Members(Bus(None), (kind,))
    stages = Stages(members, OutputSessions())
    members.on_change(stages.apply_change)
    seed = Member(kind=kind, replica_id=ADDRESS, epoch=0, address=ADDRESS)
    first = dataclasses.replace(seed, replica_id="first", epoch=new_epoch(), model=served_model)
    second = dataclasses.replace(first, replica_id="second", epoch=new_epoch())

    def connection() -> object:
        pool = stages.processors._pool if kind is Kind.PROCESSOR else stages.outputs._sessions
        return pool.get(ADDRESS)

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
        await stages.close()


async def test_a_model_without_a_processor_is_away_while_engines_serve_it_and_unknown_otherwise(
    served_model: ServedModel,
) -> None:
    """The processor of one of two models may be restarting, and clients do not retry after 404."""
    processors = Processors()
    engines = {"away", served_model.name}
    keys = {model_key(name) for name in engines}
    nothing = cast("Any", None)
    processors._pool[ADDRESS] = Processor(
        ADDRESS, nothing, nothing, nothing, models={served_model.name: served_model}
    )
    router: Any = SimpleNamespace(has_replica=lambda key: key in keys)
    model = ServedModels(processors, router, nothing).model
    assert model(served_model.name) is served_model
    with pytest.raises(Unavailable, match="no processor of the model 'away' is within reach"):
        model("away")
    with pytest.raises(NotFound):
        model("unknown")


@pytest.mark.parametrize(
    ("needs_engine", "facts", "ready"),
    [
        ("once", {}, False),
        ("once", {"had_replicas": True}, True),
        ("once", {"is_served": True}, True),
        ("always", {"had_replicas": True, "is_served": True}, False),
        ("never", {}, True),
        ("never", {"patience": 0.0}, False),
    ],
)
def test_without_an_engine_a_gateway_is_ready_where_one_comes_by_itself(
    needs_engine: str, facts: dict[str, Any], ready: bool
) -> None:
    """Not while the first engine loads: requests would wait for as long as that takes."""
    router = SimpleNamespace(has_replicas=False, had_replicas=facts.get("had_replicas", False))
    there: Any = SimpleNamespace(
        needs_engine=needs_engine,
        router=router,
        stages=SimpleNamespace(
            processors=SimpleNamespace(models=lambda: {"m": None}),
            outputs=SimpleNamespace(is_reachable=True),
        ),
        catalogues=SimpleNamespace(is_served=lambda: facts.get("is_served", False)),
        cold_starts=SimpleNamespace(patience=facts.get("patience", 60.0)),
        draining=False,
    )
    there._comes_by_itself = lambda: Cluster._comes_by_itself(there)
    assert Cluster.missing(there) == ([] if ready else ["engine"])
    assert Cluster.awaited(there) == (["engine"] if ready else [])
    router.has_replicas = True
    assert (Cluster.missing(there), Cluster.awaited(there)) == ([], [])
