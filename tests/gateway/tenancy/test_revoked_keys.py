"""What runs or waits ends when its key is revoked or expires, or its tenant is removed; nothing
runs without limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headwater.gateway.tenancy.directory import TenantDirectory, new_key
from headwater.gateway.tenancy.records import Limits, Removed, TenantRecord, new_uid
from headwater.gateway.tenancy.tenant_store import TenantStore
from headwater.gateway.tenancy.tenants import AdminKeys, KeyedTenants, Tenant
from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import KeyRevoked, Unauthenticated, Unavailable
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, UNDRAFTED, Behind, Gateway, completion_body
from tests.gateway.tenancy.test_line_of_tenants import ADMIN, COMPLETIONS, Customer, admin

USED_UP_BY_A_BATCH = {"requests_per_minute": 3}
"""A completion, a file and a batch."""
LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True} | UNDRAFTED
"""An answer of more than a minute."""
LONG_RESPONSE = {
    "model": MODEL,
    "input": "x",
    "max_output_tokens": 8000,
    "ignore_eos": True,
} | UNDRAFTED
NOBODY = AdminKeys({})
Revoke = Callable[[Customer], Any]


@pytest.fixture(scope="module")
def slow(
    slow_behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    shared_redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    """A gateway that runs two requests at once, over an engine that takes its time."""
    path = tmp_path_factory.mktemp("keys") / "admins"
    path.write_text(f"carol {ADMIN}\n")
    flags = (
        f"--nats-url={nats_url}",
        f"--redis-url={shared_redis_url}",
        f"--admin-key-file={path}",
    )
    with start_gateway(slow_behind, *flags, "--max-running=2") as gateway:
        yield gateway


def remove(ada: Customer) -> None:
    assert admin(ada.gateway, "DELETE", f"/tenants/{ada.id}").status_code == 200


def revoke(ada: Customer) -> None:
    key_id = ada.key.split("-")[1]
    assert admin(ada.gateway, "DELETE", f"/tenants/{ada.id}/keys/{key_id}").status_code == 200


def expire(ada: Customer) -> None:
    another_key(ada, expire_others_after=1)


def another_key(ada: Customer, **more: Any) -> dict[str, str]:
    made = admin(ada.gateway, "POST", f"/tenants/{ada.id}/keys", more)
    return {"authorization": f"Bearer {made.json()['key']}"}


def test_a_key_works_at_the_gateway_that_made_it_before_the_bus_reports_it(slow: Gateway) -> None:
    def status(key: str) -> int:
        return slow.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    for i in range(3):
        first = admin(slow, "POST", "/tenants", {"id": f"hasty{i}"}).json()["key"]
        assert status(first) == 200
        second = admin(slow, "POST", f"/tenants/hasty{i}/keys", {"expire_others_after": 0}).json()[
            "key"
        ]
        assert (status(first), status(second)) == (401, 200)
        assert admin(slow, "DELETE", f"/tenants/hasty{i}").status_code == 200
        assert status(second) == 401


ENDS = pytest.mark.parametrize("end", [remove, revoke, expire])


@ENDS
def test_an_answer_that_is_streamed_ends_when_its_key_does(slow: Gateway, end: Revoke) -> None:
    ada = Customer(slow)
    body = completion_body(**LONG, stream=True)
    with slow.client.stream("POST", COMPLETIONS, json=body, headers=ada.headers) as reply:
        events = (
            line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")
        )
        assert "error" not in json.loads(next(events))
        end(ada)
        reported = list(events)
    assert json.loads(reported[-1])["error"]["code"] == "key_revoked"
    slow.wait_until(lambda: slow.metric("headwater_num_streams") == 0)


@ENDS
def test_over_grpc_too(slow: Gateway, end: Revoke) -> None:
    ada = Customer(slow)
    with grpc.insecure_channel(slow.grpc) as channel:
        request = inference_pb2.CompleteRequest(model=MODEL, text="x", sampling=LONG)
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.CompleteStream(request, metadata=[("authorization", f"Bearer {ada.key}")])
        next(stream)
        end(ada)
        with pytest.raises(grpc.RpcError) as raised:
            list(stream)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        info = error_details_pb2.ErrorInfo()
        status = rpc_status.from_call(raised.value)
        assert status is not None
        assert any(detail.Unpack(info) for detail in status.details)
        assert info.reason == "key_revoked"
    slow.wait_until(lambda: slow.metric("headwater_num_streams") == 0)


@ENDS
def test_a_request_that_waits_for_its_turn_ends_when_its_key_does(
    slow: Gateway, end: Revoke
) -> None:
    first = Customer(slow)
    second = Customer(slow)
    replies = []
    asked = {"json": completion_body(**LONG, stream=True), "headers": first.headers}
    with contextlib.ExitStack() as ahead:
        streams = [
            ahead.enter_context(slow.client.stream("POST", COMPLETIONS, **asked)).iter_raw()
            for _ in range(2)
        ]
        for stream in streams:
            next(stream)
        waiting = threading.Thread(
            target=lambda: replies.append(second.post(COMPLETIONS, completion_body()))
        )
        waiting.start()
        slow.wait_until(lambda: slow.metric("headwater_num_requests_waiting") == 1)
        end(second)
        waiting.join(60)
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [
        (401, "key_revoked")
    ]


def test_lines_of_a_batch_that_its_limits_held_back_do_not_run_without_them(slow: Gateway) -> None:
    ada = Customer(slow, limits=USED_UP_BY_A_BATCH)
    other = another_key(ada)
    assert ada.post(COMPLETIONS, completion_body()).status_code == 200
    batch_id = batch_of(ada, 40)
    slow.wait_until(
        lambda: ada.get(f"/v1/batches/{batch_id}").json().get("status") == "in_progress"
    )
    revoke(ada)

    def batch() -> dict[str, Any]:
        found: dict[str, Any] = slow.client.get(f"/v1/batches/{batch_id}", headers=other).json()
        return found

    ended = slow.first(batch, lambda each: each.get("status") == "completed")
    counts = ended["request_counts"]
    assert (counts["completed"], counts["failed"]) == (0, 40)
    admin(slow, "PATCH", f"/tenants/{ada.id}", {"limits": {"requests_per_minute": None}})
    errors = f"/v1/files/{ended['error_file_id']}/content"
    content = slow.first(
        lambda: slow.client.get(errors, headers=other), lambda reply: reply.status_code == 200
    )
    codes = [
        json.loads(line)["response"]["body"]["error"]["code"] for line in content.text.splitlines()
    ]
    assert codes == ["key_revoked"] * 40


def test_lines_of_a_batch_whose_tenant_is_removed_do_not_run_at_all(slow: Gateway) -> None:
    ada = Customer(slow, limits=USED_UP_BY_A_BATCH)
    uid = admin(slow, "GET", f"/tenants/{ada.id}").json()["uid"]
    assert ada.post(COMPLETIONS, completion_body()).status_code == 200
    batch_id = batch_of(ada, 40)
    slow.wait_until(
        lambda: ada.get(f"/v1/batches/{batch_id}").json().get("status") == "in_progress"
    )
    before = slow.metric("headwater_batch_lines_total")
    remove(ada)
    bob = Customer(slow)
    other = batch_of(bob, 20)
    slow.wait_until(lambda: bob.get(f"/v1/batches/{other}").json().get("status") == "completed")
    # The usage record may be written after its answer has been returned.
    usage = slow.first(lambda: admin(slow, "GET", f"/tenants/{uid}/usage").json()["data"], bool)
    assert sum(row["requests"] for row in usage) == 1
    assert slow.metric("headwater_batch_lines_total") >= before + 20


def batch_of(ada: Customer, num_lines: int) -> str:
    body = completion_body(max_tokens=2)
    lines = [
        {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
        for number in range(num_lines)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = ada.gateway.client.post(
        "/v1/files",
        headers=ada.headers,
        files={"file": ("lines.jsonl", content)},
        data={"purpose": "batch"},
    ).json()
    made = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    return str(ada.post("/v1/batches", made).json()["id"])


def test_an_upload_that_outlasts_its_key_leaves_no_file(slow: Gateway) -> None:
    ada = Customer(slow)
    other = another_key(ada)
    head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'content-disposition: form-data; name="file"; filename="late.jsonl"\r\n\r\n'

    def body() -> Iterator[bytes]:
        yield head + b"half"
        revoke(ada)
        slow.wait_until(lambda: ada.get("/v1/models").status_code == 401)
        yield b"half\r\n--b--\r\n"

    headers = ada.headers | {"content-type": "multipart/form-data; boundary=b"}
    assert slow.client.post("/v1/files", headers=headers, content=body()).status_code == 401
    assert slow.client.get("/v1/files", headers=other).json()["data"] == []


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_in_the_background_fails_when_its_key_is_revoked(
    slow: Gateway, is_streamed: bool
) -> None:
    ada = Customer(slow)
    other = another_key(ada)
    asked = LONG_RESPONSE | {"background": True}
    if is_streamed:
        with slow.client.stream(
            "POST", "/v1/responses", json=asked | {"stream": True}, headers=ada.headers
        ) as reply:
            events = (
                json.loads(line.removeprefix("data: "))
                for line in reply.iter_lines()
                if line[:5] == "data:"
            )
            response_id = next(events)["response"]["id"]
            assert any(event["type"] == "response.output_text.delta" for event in events)
            revoke(ada)
            reported = list(events)
        assert reported[-1]["type"] in ("response.failed", "error")
    else:
        response_id = ada.post("/v1/responses", asked).json()["id"]
        slow.wait_until(
            lambda: ada.get(f"/v1/responses/{response_id}").json().get("status") == "in_progress"
        )
        slow.wait_until(lambda: slow.metric("headwater_num_streams") == 1)
        revoke(ada)

    def found() -> dict[str, Any]:
        response: dict[str, Any] = slow.client.get(
            f"/v1/responses/{response_id}", headers=other
        ).json()
        return response

    # A store that takes its time on a busy machine is answered by 503: no status yet.
    assert (
        slow.first(found, lambda response: response.get("status") == "failed")["error"]["code"]
        == "key_revoked"
    )
    slow.wait_until(lambda: slow.metric("headwater_num_streams") == 0)


def test_a_reader_of_a_background_response_is_disconnected_with_its_tenant(
    slow: Gateway,
) -> None:
    ada = Customer(slow)
    asked = LONG_RESPONSE | {"background": True}
    with slow.client.stream(
        "POST", "/v1/responses", json=asked | {"stream": True}, headers=ada.headers
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        remove(ada)
        reported = [line for line in lines if line.startswith("data: ")]
    assert "key_revoked" in reported[-1]


# What a gateway knows of keys.


@pytest.fixture
def record() -> tuple[TenantRecord, str]:
    key, secret = new_key()
    limited = TenantRecord(
        id=f"t-{uuid.uuid4().hex[:8]}",
        uid=new_uid(),
        keys=(key,),
        limits=Limits(requests_per_minute=1),
    )
    return limited, secret


async def test_removal_lifts_no_limit(nats_url: str, record: tuple[TenantRecord, str]) -> None:
    limited, secret = record
    async with Bus.open(nats_url) as bus:
        book = TenantStore(bus)
        await book.add(limited)
        async with TenantDirectory(book, NOBODY).running(bus) as directory:
            ada = directory.identify(f"Bearer {secret}", "")
            assert [scope.name for scope in directory.scopes(ada, MODEL)] == ["tenant"]
            await book.remove(limited.id)
            await directory.read()
            for ask in (lambda: directory.scopes(ada, MODEL), lambda: directory.check(ada)):
                with pytest.raises(KeyRevoked):
                    ask()
            # Nor does the name, with whoever has it now.
            await book.add(TenantRecord(id=limited.id, uid=new_uid()))
            await directory.read()
            with pytest.raises(KeyRevoked):
                directory.scopes(ada, MODEL)


async def test_a_gateway_without_tenants_yet_runs_none_of_their_requests_without_limits(
    record: tuple[TenantRecord, str],
) -> None:
    limited, _ = record
    async with Bus.open(None) as bus:
        directory = TenantDirectory(TenantStore(bus), NOBODY)
        with pytest.raises(Unavailable, match="not known yet"):
            directory.scopes(limited.tenant, MODEL)
        directory.check(Tenant(id="admin"))


async def about_to_expire(book: TenantStore, directory: TenantDirectory) -> Tenant:
    """A tenant whose key is still valid. A busy machine may learn of a key only after it expired:
    the next one lasts longer."""
    for seconds in (0.5, 4.0, 16.0):
        key, secret = new_key(expires_at=time.time() + seconds)
        await book.add(TenantRecord(id=f"t-{uuid.uuid4().hex[:8]}", uid=new_uid(), keys=(key,)))
        while key.is_valid(time.time()):
            with contextlib.suppress(Unauthenticated, Unavailable):
                return directory.identify(f"Bearer {secret}", "")
            await asyncio.sleep(0.01)
    raise AssertionError("no key was known before it expired")


async def test_the_end_of_a_key_is_published_when_it_expires(nats_url: str) -> None:
    async with Bus.open(nats_url) as bus:
        book = TenantStore(bus)
        async with TenantDirectory(book, NOBODY).running(bus) as directory:
            ada = await about_to_expire(book, directory)
            reported = asyncio.Event()

            def look() -> None:
                try:
                    directory.check(ada)
                except KeyRevoked:
                    reported.set()

            directory.on_change(look)
            look()
            async with asyncio.timeout(60):
                await reported.wait()


def test_a_key_that_left_the_key_file_is_revoked_though_its_tenant_is_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ada first-key\nada second-key\n")
    ada = KeyedTenants.read(path).identify("Bearer second-key", "")
    path.write_text("ada first-key\n")
    with pytest.raises(KeyRevoked):
        KeyedTenants.read(path).check(ada)
    KeyedTenants.read(path).check(Tenant(id="ada"))


class HeldRecords:
    """A tenant store whose first reading lasts until it may end."""

    def __init__(self, records: list[TenantRecord]) -> None:
        self.records = records
        self.may_end = asyncio.Event()
        self._num_read = 0

    async def removed(self) -> list[Removed]:
        return []

    async def all(self) -> list[TenantRecord]:
        found = self.records
        self._num_read += 1
        if self._num_read == 1:
            await self.may_end.wait()
        return found


async def test_a_read_that_ends_late_makes_no_revoked_key_valid_again() -> None:
    key, secret = new_key()
    held = HeldRecords([TenantRecord(id="ada", uid=new_uid(), keys=(key,))])
    directory = TenantDirectory(cast("TenantStore", held), NOBODY)
    reading = asyncio.create_task(directory.read())
    await until_idle()
    held.records = []
    later = asyncio.create_task(directory.read())
    await until_idle()
    held.may_end.set()
    await asyncio.gather(reading, later)
    with pytest.raises(Unauthenticated):
        directory.identify(f"Bearer {secret}", "")


async def until_idle() -> None:
    """Lets tasks go on until they wait for something else."""
    for _ in range(20):
        await asyncio.sleep(0)
