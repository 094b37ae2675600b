"""Limits while Redis is away, and when it comes back with nothing."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from pathlib import Path
from typing import Any

import pytest

from headwater.gateway.tenancy.accounts import Accounts
from headwater.gateway.tenancy.directory import TenantDirectory, new_key
from headwater.gateway.tenancy.grant import Grant, refused
from headwater.gateway.tenancy.limiter import NEVER, ONE_CHOICE, Choices, Limiter
from headwater.gateway.tenancy.local_limits import LocalLimits
from headwater.gateway.tenancy.records import Limits, Scope, TenantRecord
from headwater.gateway.tenancy.snapshot import Snapshot
from headwater.gateway.tenancy.tenant_store import TenantStore
from headwater.gateway.tenancy.tenants import AdminKeys, Tenant
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import Unauthenticated, Unavailable
from headwater.services.runtime.store import Store
from headwater.services.runtime.usage_log import UsageLog
from headwater.services.stack.embedded import start_valkey
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, completion_body

ADMIN = "admin-key-of-the-house"
NOBODY = AdminKeys({})


def test_alone_a_gateway_grants_its_share_and_no_more() -> None:
    now = 0.0
    local = LocalLimits(0.5, clock=lambda: now)
    scopes = [
        Scope(
            "tenant",
            Limits(requests_per_minute=4, concurrency=10, tokens_per_minute=1000, budget=1000),
        )
    ]
    counted = [local.count("ada", scopes) for _ in range(3)]
    assert [each.refusal is None for each in counted] == [True, True, False]
    assert counted[2].refusal is not None
    assert (counted[2].refusal.limit, counted[2].refusal.seconds) == ("requests", 65.0)
    assert [each.requests.remaining for each in counted if each.requests] == [1, 0, 0]
    grants = [local.reserve("ada", scopes, most=100, least=1) for _ in range(2)]
    assert [each.granted for each in grants] == [100, 100]
    now = 65.0
    assert local.reserve("ada", scopes, most=400, least=1).granted == 300, (
        "what half the budget has left"
    )
    refusal = local.reserve("ada", scopes, most=400, least=1).refusal
    assert refusal is not None
    assert (refusal.limit, refusal.seconds) == ("share of budget", 5.0)
    error = refused(refusal, "ada")
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 5.0), (
        "there may be more when Redis is back"
    )
    refusal = local.reserve("ada", scopes, most=2000, least=1001).refusal
    assert refusal is not None
    assert (refusal.limit, refusal.seconds) == ("budget", NEVER)
    local.settle("ada", scopes, unused=250)
    assert local.reserve("ada", scopes, most=400, least=1).granted == 250


def test_alone_a_gateway_keeps_thirteen_slots_however_many_grants_it_makes() -> None:
    now = 0.0
    local = LocalLimits(1.0, clock=lambda: now)
    scopes = [Scope("tenant", Limits(requests_per_minute=100_000, tokens_per_minute=100_000))]
    for i in range(1400):
        now = i / 10
        assert local.count("ada", scopes).refusal is None
        assert local.reserve("ada", scopes, most=20, least=1).granted == 20
        local.settle("ada", scopes, unused=10)
    [counts] = local._counts.values()
    assert len(counts.slots) == 13
    assert set(map(tuple, counts.slots.values())) == {(50, 500)}, (
        "requests and used tokens of five seconds"
    )


def test_alone_a_gateway_says_when_enough_tokens_of_the_minute_are_over() -> None:
    now = 0.0
    local = LocalLimits(1.0, clock=lambda: now)
    scopes = [Scope("tenant", Limits(tokens_per_minute=1000))]
    for at, tokens in ((1.0, 100), (11.0, 700), (12.0, 200)):
        now = at
        assert local.reserve("ada", scopes, most=tokens, least=1).granted == tokens
    # The last request used half of its tokens: 900 count, of which 100 are over at 65 s and the
    # others at 75 s.
    local.settle("ada", scopes, unused=100)
    waits = [
        local.reserve("ada", scopes, most=tokens, least=tokens).refusal
        for tokens in (200, 300, 1001)
    ]
    assert [each.seconds for each in waits if each] == [53.0, 63.0, NEVER]
    now = 65.0
    assert local.reserve("ada", scopes, most=200, least=200).granted == 200


def test_alone_a_gateway_says_never_only_where_the_whole_limit_is_too_low() -> None:
    local = LocalLimits(0.5, clock=lambda: 0.0)
    scopes = [Scope("tenant", Limits(tokens_per_minute=1000, concurrency=10))]
    codes = []
    for tokens, seats in ((600, 1), (1001, 1), (1, 6), (1, 11)):
        refusal = local.reserve(
            "ada", scopes, most=tokens, least=tokens, choices=Choices(seats, seats)
        ).refusal
        assert refusal is not None
        codes.append((refused(refusal, "ada").code, refusal.seconds))
    retry = "rate_limit_exceeded"
    never = ("limit_too_low", NEVER)
    assert codes == [(retry, 65.0), never, (retry, 1.0), never]


class Spender:
    """A tenant with a budget of 200 tokens and its requests to a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._admin = {"authorization": f"Bearer {ADMIN}"}
        made = gateway.client.post(
            "/admin/tenants",
            json={
                "id": f"t-{uuid.uuid4().hex[:8]}",
                "limits": {"budget": 200, "requests_per_minute": 10**6},
            },
            headers=self._admin,
        ).json()
        self._id = made["id"]
        self._headers = {"authorization": f"Bearer {made['key']}"}

    def is_known(self) -> bool:
        return self._gateway.client.get("/v1/models", headers=self._headers).status_code == 200

    def ask(self, num_tokens: int) -> int:
        """Asks for so many tokens after a prompt of ten, and returns the status."""
        body = completion_body([5] * 10, max_tokens=num_tokens, ignore_eos=True)
        return self._gateway.client.post(
            "/v1/completions", json=body, headers=self._headers
        ).status_code

    def num_recorded(self) -> int:
        """Output tokens in the usage records."""
        rows = self._gateway.client.get(
            f"/admin/tenants/{self._id}/usage", headers=self._admin
        ).json()["data"]
        return sum(row["output_tokens"] for row in rows)

    def shares_again(self) -> bool:
        """Whether the gateway counts in Redis again."""
        # This call counts in Redis if Redis is there, and uses nothing of the budget.
        self._gateway.client.post(
            "/tokenize", json={"model": MODEL, "prompt": "x"}, headers=self._headers
        )
        return self._gateway.stage.says("limits are shared again")


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
async def test_a_lost_redis_costs_no_request_and_an_emptied_one_no_budget(
    share: float,
    behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    free_dir: Path,
    kept: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWATER_ADMIN_KEY", ADMIN)
    valkey = await start_valkey(free_dir, **kept)
    flags = (
        f"--nats-url={nats_url}",
        f"--redis-url={valkey.url}",
        f"--fail-open-share={share}",
        "--log-level=info",
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(valkey.stop)
        gateway: Gateway = await asyncio.to_thread(
            stack.enter_context, start_gateway(behind, *flags)
        )
        tenant = Spender(gateway)
        gateway.wait_until(tenant.is_known)
        assert tenant.ask(90) == 200
        await valkey.kill()
        assert tenant.ask(40) == (200 if share else 503)
        gateway.wait_until(lambda: tenant.num_recorded() == (90 + 40 if share else 90))
        again = await start_valkey(free_dir, port=valkey.port, **kept)
        stack.push_async_callback(again.stop)
        gateway.wait_until(tenant.shares_again)
        # The records know of 100 tokens, and of 50 more where they were granted without Redis.
        gateway.wait_until(lambda: tenant.ask(40 if share else 90) in (200, 429))
        assert tenant.ask(1) == 429


async def test_a_gateway_that_starts_without_nats_knows_who_was_a_tenant(
    nats_url: str, free_dir: Path
) -> None:
    path = free_dir / "state" / "tenants.json"
    key, secret = new_key()
    record = TenantRecord(id=f"t-{key.id}", keys=(key,), weight=3.0, limits=Limits(concurrency=4))
    async with Bus.open(nats_url) as bus:
        await TenantStore(bus).add(record)
        async with TenantDirectory(TenantStore(bus), NOBODY, None, Snapshot(str(path))).running(
            bus
        ):
            pass
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret.encode() not in path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == ["tenants.json"], (
        "no half of one is left"
    )
    async with Bus.open(None) as bus, directory_of(bus, path) as directory:
        tenant = directory.identify(f"Bearer {secret}", "")
        assert (tenant.id, tenant.weight) == (record.id, 3.0)
        assert directory.scopes(tenant, "m") == [Scope("tenant", Limits(concurrency=4))]
        with pytest.raises(Unauthenticated):
            directory.identify(f"Bearer {secret[:-1]}x", "")
        directory.check(tenant)
        directory.check(
            Tenant(id="named by an administrator", uid="admin~named by an administrator")
        )
        with pytest.raises(Unauthenticated):
            directory.check(Tenant(id="removed", key_id="k"))
    path.write_text("[{")
    async with Bus.open(None) as bus, directory_of(bus, path) as directory:
        with pytest.raises(Unavailable):
            directory.identify(f"Bearer {secret}", "")


async def test_an_unreadable_record_takes_no_tenants_key(nats_url: str) -> None:
    key, secret = new_key()
    record = TenantRecord(id=f"t-{key.id}", keys=(key,))
    async with Bus.open(nats_url) as bus:
        book = TenantStore(bus)
        await book.add(record)
        async with TenantDirectory(book, NOBODY).running(bus) as directory:
            bucket = await book._open()
            await bucket.put("later", b'{"id": "later", "limits": {"of_a_later_version": 1}}')
            try:
                assert not await directory.read()
            finally:
                await bucket.purge("later")
            assert directory.identify(f"Bearer {secret}", "").id == record.id
            assert await directory.read()


def directory_of(bus: Bus, path: Path) -> contextlib.AbstractAsyncContextManager[TenantDirectory]:
    return TenantDirectory(TenantStore(bus), NOBODY, None, Snapshot(str(path))).running(bus)


async def test_without_redis_an_answer_goes_on_within_the_gateways_own_share(
    redis_url: str,
) -> None:
    scopes = [Scope("tenant", Limits(budget=200))]
    grant = Grant(tenant=Tenant(id=uuid.uuid4().hex), request_id="r", scopes=scopes, granted=10)
    async with Store.open(redis_url) as store:
        accounts = Accounts(
            Limiter(store), UsageLog(Bus(None)), gateway_id="g", fail_open_share=0.5
        )
        verdicts = [await accounts.extend(grant, 60) for _ in range(3)]
    assert [each.granted for each in verdicts] == [60, 40, 0]
    assert verdicts[-1].refusal is not None
    assert (verdicts[-1].refusal.limit, verdicts[-1].refusal.seconds) == ("share of budget", 5.0)


async def test_a_client_that_leaves_while_its_request_is_reserved_keeps_no_seat(
    redis_url: str,
) -> None:
    tenant = Tenant(id=uuid.uuid4().hex)
    scopes = [Scope("tenant", Limits(concurrency=1))]
    async with Store.open(redis_url) as store:
        limiter = Limiter(store)
        accounts = Accounts(limiter, UsageLog(Bus(None)), gateway_id="g")
        asking = asyncio.create_task(
            accounts._request_or_cancel(
                Grant(tenant=tenant, request_id="left", scopes=scopes),
                most=9,
                least=1,
                choices=ONE_CHOICE,
            )
        )
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.gather(*accounts._leaving)
        assert (await limiter.reserve(tenant.id, "next", scopes, most=9, least=1)).refusal is None
