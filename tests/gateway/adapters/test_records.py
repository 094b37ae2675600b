"""Records of the catalogue of adapters: those of strangers are ignored, and those of an earlier
token are signed again."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator

import msgspec
import pytest

from headwater.gateway.adapters.catalogue import AdapterCatalogue
from headwater.gateway.adapters.records import OPERATOR, AdapterRecord
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime import cluster_key
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.cluster_key import ClusterKey
from headwater.services.runtime.errors import NotFound

OLD = "o" * 32
NEW = "n" * 32
ADA = Tenant(id="ada")
BOB = Tenant(id="bob")


@contextlib.asynccontextmanager
async def catalogue_of(nats_url: str, *tokens: str) -> AsyncIterator[AdapterCatalogue]:
    key = ClusterKey(list(tokens)) if tokens else None
    with cluster_key.using(key):
        async with Bus.open(nats_url) as bus, AdapterCatalogue(bus).running() as catalogue:
            yield catalogue


def record(owner: str = OPERATOR, tenants: tuple[str, ...] | None = None) -> AdapterRecord:
    name = f"a-{uuid.uuid4().hex[:8]}"
    return AdapterRecord(
        name=name, base="m", digest=uuid.uuid4().bytes, rank=8, owner=owner, tenants=tenants
    )


async def test_a_record_of_a_stranger_is_ignored_and_one_of_an_earlier_token_is_signed_again(
    nats_url: str,
) -> None:
    forged, kept = record(), record()
    async with catalogue_of(nats_url) as stranger:
        await stranger.put(forged)
    async with catalogue_of(nats_url, OLD) as before:
        await before.put(kept)
    async with catalogue_of(nats_url, NEW, OLD) as between:
        assert between.find(ADA, forged.name) is None
        assert between.find(ADA, kept.name) == kept
        await between.make()
    async with catalogue_of(nats_url, NEW) as after:
        assert after.find(ADA, kept.name) == kept
        await after.drop(OPERATOR, kept.name)
        with pytest.raises(NotFound):
            await after.drop(OPERATOR, kept.name)
        # A name that only a stranger has written is free.
        replaced = msgspec.structs.replace(forged, rank=16)
        await after.put(replaced)
        assert after.find(ADA, forged.name) == replaced
        await after.drop(OPERATOR, forged.name)


async def test_a_name_stands_for_the_tenants_own_adapter_before_the_operators(
    nats_url: str,
) -> None:
    given = record(tenants=(ADA.id, BOB.id))
    own = msgspec.structs.replace(record(owner=ADA.key), name=given.name)
    async with catalogue_of(nats_url) as catalogue:
        for each in (given, own):
            await catalogue.put(each)
        assert catalogue.find(ADA, given.name) == own
        assert catalogue.find(BOB, given.name) == given
        assert catalogue.find(Tenant(id="carol"), given.name) is None
        assert catalogue.seen_by(ADA)[given.name] == own
        await catalogue.drop(ADA.key, given.name)
        assert catalogue.find(ADA, given.name) == given
        # A request that began with it may still need it.
        assert catalogue.by_digest("m", own.digest) == own
        await catalogue.drop(OPERATOR, given.name)
