"""What a name gives to whoever has it next, or has it elsewhere: nothing."""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
from redis.asyncio import Redis

from headwater.gateway.admin.purge import Purge
from headwater.gateway.jobs.background.records import OVER
from headwater.gateway.jobs.batches.files import Files
from headwater.gateway.jobs.durable import BACKGROUND, BATCHES, CONTENTS, FILES, Durable
from headwater.gateway.jobs.response_store import ResponseStore
from headwater.gateway.tenancy.cache_namespace import CacheNamespaces
from headwater.gateway.tenancy.directory import TenantDirectory, new_key
from headwater.gateway.tenancy.records import Limits, Removed, TenantRecord, new_uid
from headwater.gateway.tenancy.tenant_store import TenantStore
from headwater.gateway.tenancy.tenants import AdminKeys, KeyedTenants, OpenTenants
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.settings import SettingError
from headwater.services.runtime.store import Store
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body
from tests.gateway.tenancy.test_line_of_tenants import ADMIN, CHAT, Customer, admin

RESPONSES = "/v1/responses"
CONVERSATIONS = "/v1/conversations"
NOBODY = AdminKeys({})


class Named(Customer):
    """A tenant of a name that may have been another's."""

    def __init__(self, gateway: Gateway, name: str, **settings: Any) -> None:
        self.gateway = gateway
        self.id = name
        made = admin(gateway, "POST", "/tenants", {"id": name, **settings})
        assert made.status_code == 201, made.text
        self.key = made.json()["key"]
        self.uid = made.json()["uid"]
        gateway.wait_until(lambda: self.get("/v1/models").status_code == 200)

    def upload(self, content: bytes) -> str:
        return upload(self.gateway, self.key, content)


def upload(gateway: Gateway, key: str, content: bytes) -> str:
    reply = gateway.client.post(
        "/v1/files",
        headers={"authorization": f"Bearer {key}"},
        files={"file": ("secret.jsonl", content)},
        data={"purpose": "batch"},
    )
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A name of the key file, with its key."""
    return f"shared-{uuid.uuid4().hex[:8]}", f"key-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def both(
    behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    shared_redis_url: str,
    names: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    """A gateway that has tenants in a key file and in the book."""
    folder = tmp_path_factory.mktemp("keys")
    admins = folder / "admins"
    keys = folder / "keys"
    admins.write_text(f"carol {ADMIN}\n")
    keys.write_text(f"{names[0]} {names[1]}\n")
    flags = (
        f"--nats-url={nats_url}",
        f"--redis-url={shared_redis_url}",
        f"--admin-key-file={admins}",
    )
    more = (f"--api-key-file={keys}", "--master-key=0123456789abcdef")
    with start_gateway(behind, *flags, *more) as gateway:
        yield gateway


def leave_everything(ada: Named) -> dict[str, str]:
    """Paths of everything that a tenant can leave behind."""
    line = (
        b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": '
        b'"none", "prompt": "x"}}'
    )
    file_id = ada.upload(line)
    batch = ada.post(
        "/v1/batches",
        {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"},
    ).json()
    turn = {"model": MODEL, "input": "My secret is blue.", "max_output_tokens": 4}
    response = ada.post(RESPONSES, turn)
    assert response.json()["store"] is True, response.text
    background = ada.post(RESPONSES, turn | {"background": True}).json()
    sent = {"items": [{"type": "message", "role": "user", "content": "My secret is blue."}]}
    conversation = ada.post(CONVERSATIONS, sent).json()
    paths = {
        "file": f"/v1/files/{file_id}",
        "content": f"/v1/files/{file_id}/content",
        "batch": f"/v1/batches/{batch['id']}",
        "response": f"{RESPONSES}/{response.json()['id']}",
        "background": f"{RESPONSES}/{background['id']}",
        "conversation": f"{CONVERSATIONS}/{conversation['id']}",
    }
    for path in paths.values():
        assert ada.get(path).status_code == 200, path
    # A job that runs while its tenant is removed may write once more, and its data is cleared
    # later.
    ada.gateway.wait_until(lambda: ada.get(paths["batch"]).json().get("status") == "completed")
    ada.gateway.wait_until(lambda: ada.get(paths["background"]).json().get("status") in OVER)
    return paths


def hits(ada: Customer, text: str) -> int:
    usage = ada.post(CHAT, chat_body(text)).json()["usage"]
    return int((usage["prompt_tokens_details"] or {})["cached_tokens"])


def test_a_new_tenant_with_the_name_of_a_removed_one_gets_none_of_its_data(
    both: Gateway, nats_url: str, shared_redis_url: str
) -> None:
    text = f"{uuid.uuid4()} The mountain stands. " * 20
    before = Named(both, f"n-{uuid.uuid4().hex[:8]}", limits={"budget": 3000})
    hits(before, text)
    assert hits(before, text) > 0
    paths = leave_everything(before)
    both.wait_until(lambda: bool(admin(both, "GET", f"/tenants/{before.id}/usage").json()["data"]))
    removed = admin(both, "DELETE", f"/tenants/{before.id}").json()
    assert (removed["uid"], removed["is_cleared"]) == (before.uid, True)
    after = Named(both, before.id, limits={"budget": 3000})
    assert after.uid != before.uid
    assert {path: after.get(path).status_code for path in paths.values()} == dict.fromkeys(
        paths.values(), 404
    )
    assert [after.get(path).json()["data"] for path in ("/v1/files", "/v1/batches")] == [[], []]
    assert admin(both, "GET", f"/tenants/{after.id}/usage").json()["data"] == []
    assert admin(both, "GET", f"/tenants/{before.uid}/usage").json()["data"], (
        "what it used stays on record"
    )
    assert hits(after, text) == 0
    assert after.get("/v1/models").status_code == 200
    assert asyncio.run(num_left(nats_url, shared_redis_url, before.uid)) == {}, (
        "it is not there, not only out of sight"
    )


async def num_left(nats_url: str, redis_url: str, key: str) -> dict[str, int]:
    """What lies under a tenant's key, by bucket."""
    found: dict[str, int] = {}
    async with Bus.open(nats_url) as bus:
        js = bus.jetstream()
        assert js is not None
        for name in (FILES, BATCHES, BACKGROUND):
            pattern = f"$KV.{name}.{subjects.key_of(key)}.>"
            info = await js.stream_info(f"KV_{name}", subjects_filter=pattern)
            found[name] = sum((info.state.subjects or {}).values())
    async with Redis.from_url(redis_url) as client:
        for kind in ("response", "conversation"):
            found[kind] = len(
                [
                    each
                    async for each in client.scan_iter(f"headwater:{kind}:{key.encode().hex()}:*")
                ]
            )
    return {name: number for name, number in found.items() if number}


def test_a_tenant_of_the_key_file_and_one_of_the_book_share_nothing_but_their_name(
    both: Gateway, names: tuple[str, str]
) -> None:
    name, key_of_file = names
    of_file = {"authorization": f"Bearer {key_of_file}"}
    text = f"{uuid.uuid4()} The mountain stands. " * 20
    of_book = Named(both, name)
    hits(of_book, text)
    paths = leave_everything(of_book)
    for path in paths.values():
        assert both.client.get(path, headers=of_file).status_code == 404, path
    reply = both.client.post(CHAT, json=chat_body(text), headers=of_file).json()
    assert (reply["usage"]["prompt_tokens_details"] or {})["cached_tokens"] == 0
    theirs = upload(both, key_of_file, b"theirs")
    assert of_book.get(f"/v1/files/{theirs}").status_code == 404
    admin(both, "DELETE", f"/tenants/{name}")
    assert both.client.get(f"/v1/files/{theirs}", headers=of_file).status_code == 200
    assert both.client.post(CHAT, json=chat_body(), headers=of_file).status_code == 200


@pytest.mark.parametrize("name", ["admin", "open"])
def test_no_tenant_has_a_name_under_which_others_than_tenants_keep_things(
    both: Gateway, name: str, tmp_path: Path
) -> None:
    of_admin = upload(both, ADMIN, b"for administrators")
    refused = admin(both, "POST", "/tenants", {"id": name})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id")
    assert "allowed: any name but open and admin" in refused.json()["error"]["message"]
    keys = tmp_path / "keys"
    keys.write_text(f"{name} some-key\n")
    with pytest.raises(SettingError, match="names of tenants but open and admin"):
        KeyedTenants.read(keys)
    assert (
        both.client.get(
            f"/v1/files/{of_admin}", headers={"authorization": f"Bearer {ADMIN}"}
        ).status_code
        == 200
    )
    in_its_name = {"authorization": f"Bearer {ADMIN}", "x-tenant": "admin"}
    assert both.client.get(f"/v1/files/{of_admin}", headers=in_its_name).status_code == 404
    with pytest.raises(BadRequest, match="reserved"):
        OpenTenants().identify("", "admin")


@pytest.mark.parametrize("name", ["a/b", "a~b", "t~0123", "a.b c", "a:b", "*", ">"])
def test_a_name_cannot_look_like_a_key(both: Gateway, name: str) -> None:
    assert admin(both, "POST", "/tenants", {"id": name}).status_code == 400


# Tenants of before there were ids.


def old_record(name: str) -> tuple[bytes, str]:
    """As it was written then."""
    key, secret = new_key()
    record = TenantRecord(id=name, keys=(key,), limits=Limits(budget=1000))
    written = msgspec.json.encode(record)
    assert b"uid" not in written
    return written, secret


def test_a_tenant_of_an_earlier_version_keeps_its_data_and_no_other_tenant_gets_it(
    both: Gateway, nats_url: str, shared_redis_url: str
) -> None:
    name = f"old-{uuid.uuid4().hex[:8]}"
    written, secret = old_record(name)

    async def write() -> None:
        async with Bus.open(nats_url) as bus:
            bucket = await TenantStore(bus)._open()
            await bucket.put(name.encode().hex(), written)
            await bus.publish(subjects.TENANTS_CHANGED, b"")

    asyncio.run(write())
    old = Named.__new__(Named)
    old.gateway = both
    old.id = name
    old.key = secret
    old.uid = name
    both.wait_until(lambda: old.get("/v1/models").status_code == 200)
    paths = leave_everything(old)
    assert admin(both, "GET", f"/tenants/{name}").json()["uid"] == name
    assert asyncio.run(num_left(nats_url, shared_redis_url, name)).keys() >= {
        FILES,
        BATCHES,
        "response",
    }
    admin(both, "PATCH", f"/tenants/{name}", {"weight": 2})
    assert old.get(paths["file"]).status_code == 200, "a change gives it no other key"
    admin(both, "DELETE", f"/tenants/{name}")
    new = Named(both, name)
    assert {path: new.get(path).status_code for path in paths.values()} == dict.fromkeys(
        paths.values(), 404
    )
    assert asyncio.run(num_left(nats_url, shared_redis_url, name)) == {}


async def test_a_key_file_never_opens_data_of_an_earlier_tenant(
    nats_url: str, tmp_path: Path
) -> None:
    name = f"old-{uuid.uuid4().hex[:8]}"
    path = tmp_path / "keys"
    path.write_text(f"{name} key-of-file\nbob key-of-bob\n")
    async with Bus.open(nats_url) as bus:
        book = TenantStore(bus)
        unread = TenantDirectory(book, NOBODY, KeyedTenants.read(path))
        assert unread.identify("Bearer key-of-file", "").key == f"file~{name}", (
            "the book may have that name"
        )
        await (await book._open()).put(name.encode().hex(), old_record(name)[0])
        async with TenantDirectory(book, NOBODY, KeyedTenants.read(path)).running(bus) as directory:
            assert directory.identify("Bearer key-of-file", "").key == f"file~{name}"
            assert directory.identify("Bearer key-of-bob", "").key == "bob"
            removed = await book.remove(name)
            await book.cleared(removed)
            assert await directory.read()
            assert directory.identify("Bearer key-of-file", "").key == f"file~{name}", (
                "it does not inherit either"
            )


@pytest.fixture
def eager_purge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge looks for removed tenants every 50 ms and clears them at once."""
    monkeypatch.setattr("headwater.gateway.admin.purge.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("headwater.gateway.admin.purge.SETTLED_SECONDS", 0.0)


async def until_cleared(book: TenantStore, removed: Removed) -> None:
    while removed.key in {each.key for each in await book.removed()}:  # noqa: ASYNC110 (NATS sends no event)
        await asyncio.sleep(0.02)


async def no_adapters(key: str) -> None:
    """The tenant has brought none."""


@pytest.mark.usefixtures("eager_purge")
async def test_what_a_gateway_could_not_delete_is_deleted_later(
    nats_url: str, redis_url: str
) -> None:
    record = TenantRecord(id=f"t-{uuid.uuid4().hex[:8]}", uid=new_uid())
    async with Bus.open(nats_url) as bus, Store.open(redis_url) as store:
        book = TenantStore(bus)
        durable = Durable(bus)
        await book.add(record)
        removed = await book.remove(record.id)
        # A request that was still running.
        file = await Files(durable).add(record.key, "late", "batch", io.BytesIO(b"late"), 4)
        async with Purge(book, durable, ResponseStore(store, 60.0), no_adapters).running():
            async with asyncio.timeout(60):
                await until_cleared(book, removed)
        rooms = await durable.rooms()
        assert [key async for key, _ in rooms.files.all(f"{subjects.key_of(record.key)}.>")] == []
        chunks = await rooms.js.stream_info(f"OBJ_{CONTENTS}", subjects_filter=f"$O.{CONTENTS}.>")
        assert file.id not in str(chunks.state.subjects)


@pytest.mark.usefixtures("eager_purge")
async def test_a_deletion_that_redis_refuses_is_retried(nats_url: str, redis_url: str) -> None:
    record = TenantRecord(id=f"t-{uuid.uuid4().hex[:8]}", uid=new_uid())
    async with Bus.open(nats_url) as bus, Store.open(redis_url) as store, asyncio.timeout(60):
        book = TenantStore(bus)
        await book.add(record)
        of_another_type = f"headwater:stored:{{{record.key.encode().hex()}}}:until"
        await store.command("SET", of_another_type, "x")
        removed = await book.remove(record.id)
        with structlog.testing.capture_logs() as lines:
            async with Purge(book, Durable(bus), ResponseStore(store, 60.0), no_adapters).running():
                while record.key not in {line.get("key") for line in lines}:  # noqa: ASYNC110 (a log has no event)
                    await asyncio.sleep(0.02)
                await store.command("DEL", of_another_type)
                await until_cleared(book, removed)


def test_namespaces_of_two_tenants_with_one_name_differ(served_model: ServedModel) -> None:
    namespaces = CacheNamespaces(b"0123456789abcdef")
    keys = [TenantRecord(id="ada", uid=new_uid()).key for _ in range(2)]
    assert len({namespaces.of(key, served_model) for key in (*keys, "ada")}) == 3
