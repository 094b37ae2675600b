"""Blocks of removed tenants, on the disk of an engine and over a real bus."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.disk.block_files import BlockFiles
from headwater.engine_core.kv.tenant_files import tenants_below
from headwater.gateway.tenancy.directory import TenantDirectory
from headwater.gateway.tenancy.gone_tenants import gone_tenants_published
from headwater.gateway.tenancy.records import TenantRecord, new_uid
from headwater.gateway.tenancy.tenant_store import TenantStore
from headwater.gateway.tenancy.tenants import AdminKeys
from headwater.services.engine.stage import tenant_sweep
from headwater.services.engine.stage.tenant_sweep import TenantSweep
from headwater.services.runtime.bus import Bus


class Disk:
    """What an engine left there."""

    def __init__(self, root: Path, *tenants: str) -> None:
        self.root = root
        files = BlockFiles.open(root, b"k" * 16, 1 << 20, BlockSeal())
        for number, tenant in enumerate(tenants):
            files.write(Owner(bytes([number]) * 16, tenant), b"h" * 16, b"", memoryview(b"block"))
        files.close()

    async def until_left(self, *tenants: str) -> None:
        for _ in range(3000):
            if tenants_below(self.root) == set(tenants):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(tenants_below(self.root))


def record(name: str) -> TenantRecord:
    return TenantRecord(id=f"{name}-{uuid.uuid4().hex[:8]}", uid=new_uid())


async def test_the_blocks_of_a_removed_tenant_leave_every_disk_and_no_others(
    nats_url: str, tmp_path: Path
) -> None:
    async with (
        Bus.open(nats_url, wait_seconds=60.0) as bus,
        Bus.open(nats_url, wait_seconds=60.0) as engines_bus,
    ):
        store = TenantStore(bus)
        await store.make()
        alice = record("alice")
        bob = record("bob")
        for each in (alice, bob):
            await store.add(each)
        disk = Disk(tmp_path, alice.key, bob.key, "carol of the key file", "")
        directory = TenantDirectory(store, AdminKeys({}))
        async with (
            directory.running(bus),
            gone_tenants_published(bus, directory),
            TenantSweep.running(engines_bus, tmp_path),
        ):
            await asyncio.sleep(1.0)
            await disk.until_left(alice.key, bob.key, "carol of the key file", "")
            await store.remove(alice.id)
            await disk.until_left(bob.key, "carol of the key file", "")


async def test_a_tenant_that_went_while_no_engine_ran_is_noticed_at_the_start(
    nats_url: str, tmp_path: Path
) -> None:
    async with Bus.open(nats_url, wait_seconds=60.0) as bus:
        store = TenantStore(bus)
        await store.make()
        disk = Disk(tmp_path, gone := new_uid())
        directory = TenantDirectory(store, AdminKeys({}))
        async with directory.running(bus), gone_tenants_published(bus, directory):
            assert directory.is_gone(gone)
            async with TenantSweep.running(bus, tmp_path):
                await disk.until_left()


async def test_removed_tenants_are_noticed_among_more_than_one_message_has_room_for(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [new_uid() for _ in range(60_000)]
    disk = Disk(tmp_path, *names[:2])
    # Folders of so many tenants take minutes to write.
    monkeypatch.setattr(tenant_sweep, "tenants_below", lambda root: set(names))
    async with (
        Bus.open(nats_url, wait_seconds=60.0) as bus,
        Bus.open(nats_url, wait_seconds=60.0) as engines_bus,
    ):
        store = TenantStore(bus)
        await store.make()
        directory = TenantDirectory(store, AdminKeys({}))
        async with directory.running(bus), gone_tenants_published(bus, directory):
            assert await TenantSweep(engines_bus, tmp_path).look() == 2
    await disk.until_left()


async def test_without_a_gateway_that_knows_nothing_is_deleted(
    nats_url: str, tmp_path: Path
) -> None:
    Disk(tmp_path, tenant := new_uid())
    async with Bus.open(nats_url, wait_seconds=60.0) as bus:
        assert await TenantSweep(bus, tmp_path).look() == 0
    directory = TenantDirectory(TenantStore(Bus(None)), AdminKeys({}))
    assert not directory.is_gone(tenant), "the records were never read"
    assert tenants_below(tmp_path) == {tenant}


async def test_an_engine_without_a_disk_asks_for_no_gone_tenants(nats_url: str) -> None:
    async with Bus.open(nats_url, wait_seconds=60.0) as bus, TenantSweep.running(bus, None):
        pass
