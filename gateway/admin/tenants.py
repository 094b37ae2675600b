"""The REST handlers of /admin: tenants, their keys, what they used, and what administrators did.

Each call that changes something leaves a record of who asked for what. If it cannot be written
nothing is changed, except that keys and tenants are still revoked. A key is shown once, in the
answer that made it, and is in no record and no log.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import structlog
from nats.js import JetStreamContext

from headwater.services.runtime import errors, subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.key_file import RESERVED
from headwater.services.runtime.usage_log import AUDIT_STREAM, UsageLog, make_stream, read_stream

from ..buckets import or_unavailable
from ..http.http_exchange import Exchange
from ..openai.decode import decode
from ..tenancy.caller import MAX_GOAL_MS
from ..tenancy.directory import TenantDirectory, new_key
from ..tenancy.records import Count, Key, Limits, TenantRecord, new_uid
from ..tenancy.tenants import AdminKeys, authorization_of, checked_name
from ..wire.decode import convert
from .purge import Purge

MAX_BODY_BYTES = 64 * 1024
MAX_KEYS = 64
"""Keys of a tenant."""
MAX_GRACE_SECONDS = 30 * 86_400
DEFAULT_DAYS = 31
MAX_AUDIT = 1000
PLAIN = (
    "weight",
    "tier",
    "ttft_goal_ms",
    "tpot_goal_ms",
    "shared_cache",
    "escape_special_tokens",
    "file_bytes",
    "response_bytes",
    "adapters",
    "adapter_bytes",
)
"""Fields of a tenant that a change replaces as they are."""

Weight = Annotated[float, msgspec.Meta(gt=0, le=1000, description="a number above 0, up to 1000")]
Grace = Annotated[
    int,
    msgspec.Meta(
        ge=0, le=MAX_GRACE_SECONDS, description=f"a whole number of seconds, 0…{MAX_GRACE_SECONDS}"
    ),
]
Tier = Annotated[int, msgspec.Meta(ge=0, le=100, description="a whole number, 0…100")]

GoalMs = Annotated[
    int,
    msgspec.Meta(
        ge=0, le=MAX_GOAL_MS, description=f"a whole number of milliseconds, 0…{MAX_GOAL_MS}"
    ),
]


class NewTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/tenants"""

    id: str
    weight: Weight = 1.0
    tier: Tier = 0
    ttft_goal_ms: GoalMs = 0
    tpot_goal_ms: GoalMs = 0
    shared_cache: bool = False
    escape_special_tokens: bool = False
    limits: Limits = Limits()
    models: dict[str, Limits] = {}
    file_bytes: Count | None = None
    response_bytes: Count | None = None
    adapters: Count | None = None
    adapter_bytes: Count | None = None


class Change(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """PATCH /admin/tenants/{id}: what is given replaces what was; in `limits`, each limit by
    itself, null lifts it. Null for bytes: as many as every tenant."""

    weight: Weight | msgspec.UnsetType = msgspec.UNSET
    tier: Tier | msgspec.UnsetType = msgspec.UNSET
    ttft_goal_ms: GoalMs | msgspec.UnsetType = msgspec.UNSET
    tpot_goal_ms: GoalMs | msgspec.UnsetType = msgspec.UNSET
    shared_cache: bool | msgspec.UnsetType = msgspec.UNSET
    escape_special_tokens: bool | msgspec.UnsetType = msgspec.UNSET
    limits: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    models: dict[str, dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    file_bytes: Count | msgspec.UnsetType | None = msgspec.UNSET
    response_bytes: Count | msgspec.UnsetType | None = msgspec.UNSET
    adapters: Count | msgspec.UnsetType | None = msgspec.UNSET
    adapter_bytes: Count | msgspec.UnsetType | None = msgspec.UNSET


class Rotation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/tenants/{id}/keys"""

    limits: Limits = Limits()
    expire_others_after: Grace | None = None
    """Seconds for which the tenant's other keys are still taken; absent: as long as they were."""


class AuditRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A record of a change: the administrator and what it asked for."""

    at: float
    admin: str
    action: str
    tenant: str
    change: dict[str, Any]


class TenantAdmin:
    """Tenants and their keys. Where administrators have no keys every call is refused."""

    def __init__(
        self, bus: Bus, admins: AdminKeys, directory: TenantDirectory, usage: UsageLog, purge: Purge
    ) -> None:
        self._bus = bus
        self._admins = admins
        self._usage = usage
        self._purge = purge
        self._directory = directory
        self._tenant_store = directory.tenant_store

    async def add_tenant(self, exchange: Exchange) -> None:
        admin, asked = (
            self.admin_of(exchange),
            decode(await exchange.body(MAX_BODY_BYTES), NewTenant),
        )
        _checked_id(asked.id)
        key, secret = new_key()
        record = TenantRecord(uid=new_uid(), keys=(key,), **msgspec.structs.asdict(asked))
        async with self._changing(admin, "add", asked.id, msgspec.to_builtins(asked)):
            await self._tenant_store.add(record)
        await exchange.reply_json(_shown(record) | {"key": secret}, 201)

    async def list_tenants(self, exchange: Exchange) -> None:
        self.admin_of(exchange)
        exchange.end_head()
        await exchange.reply_json(
            {
                "object": "list",
                "data": [_shown(record) for record in await self._tenant_store.all()],
            }
        )

    async def get_tenant(self, exchange: Exchange) -> None:
        self.admin_of(exchange)
        await exchange.reply_json(_shown(await self._tenant_store.get(exchange.path_params["id"])))

    async def change_tenant(self, exchange: Exchange) -> None:
        admin, asked = self.admin_of(exchange), decode(await exchange.body(MAX_BODY_BYTES), Change)
        tenant = exchange.path_params["id"]
        async with self._changing(admin, "set", tenant, msgspec.to_builtins(asked)):
            record = await self._tenant_store.change(tenant, lambda record: _changed(record, asked))
        await exchange.reply_json(_shown(record))

    async def remove_tenant(self, exchange: Exchange) -> None:
        admin = self.admin_of(exchange)
        tenant = exchange.path_params["id"]
        async with self._changing(admin, "remove", tenant, {}, must_be=False):
            removed = await self._tenant_store.remove(tenant)
        is_cleared = await self._purge.clear(removed)
        answer = {
            "id": tenant,
            "object": "tenant",
            "deleted": True,
            "uid": removed.key,
            "is_cleared": is_cleared,
        }
        await exchange.reply_json(answer)

    async def add_key(self, exchange: Exchange) -> None:
        """Adds a key to a tenant. `expire_others_after` makes its earlier keys expire after so many
        seconds."""
        admin, asked = (
            self.admin_of(exchange),
            decode(await exchange.body(MAX_BODY_BYTES) or b"{}", Rotation),
        )
        tenant, (key, secret), now = exchange.path_params["id"], new_key(), time.time()
        key = msgspec.structs.replace(key, limits=asked.limits)

        def change(record: TenantRecord) -> TenantRecord:
            others = tuple(
                _ending(each, asked.expire_others_after, now)
                for each in record.keys
                if each.is_valid(now)
            )
            if len(others) >= MAX_KEYS:
                raise errors.BadRequest(
                    "id", f"tenant {record.id} has {MAX_KEYS} keys; allowed: {MAX_KEYS}"
                )
            return msgspec.structs.replace(record, keys=(*others, key))

        async with self._changing(
            admin, "add-key", tenant, {"key_id": key.id, **msgspec.to_builtins(asked)}
        ):
            record = await self._tenant_store.change(tenant, change)
        await exchange.reply_json(_shown(record) | {"key": secret}, 201)

    async def remove_key(self, exchange: Exchange) -> None:
        admin = self.admin_of(exchange)
        tenant = exchange.path_params["id"]
        key_id = exchange.path_params["key_id"]

        def change(record: TenantRecord) -> TenantRecord:
            keys = tuple(key for key in record.keys if key.id != key_id)
            if len(keys) == len(record.keys):
                raise errors.NotFound("key", key_id)
            return msgspec.structs.replace(record, keys=keys)

        async with self._changing(admin, "remove-key", tenant, {"key_id": key_id}, must_be=False):
            record = await self._tenant_store.change(tenant, change)
        await exchange.reply_json(_shown(record))

    async def usage(self, exchange: Exchange) -> None:
        """Usage by day and model, of the last `days`."""
        self.admin_of(exchange)
        tenant = exchange.path_params["id"]
        days = _days(exchange.query.get("days", str(DEFAULT_DAYS)))
        exchange.end_head()
        today = datetime.datetime.now(datetime.UTC).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        with or_unavailable():
            async for _, record in self._usage.read(
                await self._key_of(tenant), today - datetime.timedelta(days=days - 1)
            ):
                day = datetime.datetime.fromtimestamp(record.at, datetime.UTC).date().isoformat()
                row = rows.setdefault(
                    (day, record.model),
                    {"day": day, "model": record.model}
                    | dict.fromkeys(
                        ("requests", "prompt_tokens", "cached_tokens", "output_tokens"), 0
                    ),
                )
                # A resumed request has a record of its own, without a prompt.
                row["requests"] += record.prompts > 0
                for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                    row[name] += getattr(record, name)
        await exchange.reply_json(
            {"object": "list", "tenant": tenant, "data": [rows[key] for key in sorted(rows)]}
        )

    async def _key_of(self, tenant: str) -> str:
        """The key of a tenant's records, found by its name; for a removed tenant, the key
        itself."""
        try:
            return (await self._tenant_store.get(tenant)).key
        except errors.NotFound:
            return tenant

    async def audit(self, exchange: Exchange) -> None:
        """Changes of the last `days`, oldest first; of too many, the youngest."""
        self.admin_of(exchange)
        days = _days(exchange.query.get("days", str(DEFAULT_DAYS)))
        exchange.end_head()
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
        with or_unavailable():
            stored = read_stream(self._bus, AUDIT_STREAM, subjects.AUDIT, since)
            found = [msgspec.Raw(each.data) async for each in stored]
        await exchange.reply_json({"object": "list", "data": found[-MAX_AUDIT:]})

    def admin_of(self, exchange: Exchange) -> str:
        """Raises `Unauthenticated`, `PermissionDenied`."""
        name = self._admins.name_of(authorization_of(exchange.headers))
        if name is None:
            structlog.get_logger().warning(
                "administration refused", method=exchange.method, path=exchange.path
            )
            raise errors.PermissionDenied("this needs an administrator's key")
        return name

    def is_admin(self, exchange: Exchange) -> bool:
        """Whether the caller is an administrator. Refuses nothing: for pages that other callers see
        too."""
        authorization = authorization_of(exchange.headers)
        return bool(authorization) and self._admins.name_of(authorization) is not None

    @contextlib.asynccontextmanager
    async def _changing(
        self, admin: str, action: str, tenant: str, change: dict[str, Any], *, must_be: bool = True
    ) -> AsyncIterator[None]:
        """Like `recorded`. This gateway applies the change before it answers; the bus tells the
        other gateways."""
        async with self.recorded(admin, action, tenant, change, must_be=must_be):
            yield
        await self._directory.read()

    @contextlib.asynccontextmanager
    async def recorded(
        self, admin: str, action: str, tenant: str, change: dict[str, Any], *, must_be: bool = True
    ) -> AsyncIterator[None]:
        """Context that writes an audit record before the change is made; a failed change has a
        second record. A change that must be made even if the record cannot be written (`must_be`)
        is then only in the log."""

        async def write(action: str, change: dict[str, Any]) -> None:
            record = AuditRecord(
                at=time.time(), admin=admin, action=action, tenant=tenant, change=change
            )
            try:
                await self._write(record)
            except errors.Unavailable:
                if must_be:
                    raise
                structlog.get_logger().error(
                    "administration not recorded", **msgspec.to_builtins(record)
                )

        await write(action, change)
        try:
            yield
        except errors.HeadwaterError as error:
            await write(f"{action}-failed", {"code": error.code})
            raise

    async def _write(self, record: AuditRecord) -> None:
        with or_unavailable():
            js = await make_audit_stream(self._bus)
            await js.publish(subjects.AUDIT, msgspec.json.encode(record))
        structlog.get_logger().info(
            "administration", admin=record.admin, action=record.action, of=record.tenant
        )


async def make_audit_stream(bus: Bus) -> JetStreamContext:
    """Makes the stream of audit records where it is missing. Raises `Unavailable`, and what NATS
    raises."""
    js = bus.jetstream()
    if js is None:
        raise errors.Unavailable("tenants need NATS with JetStream", code="storage_unavailable")
    await make_stream(js, AUDIT_STREAM, subjects.AUDIT)
    return js


def _shown(record: TenantRecord) -> dict[str, Any]:
    """A tenant without its keys' digests."""
    keys = [_fields(key, "id", "created_at", "expires_at", "limits") for key in record.keys]
    return {
        "object": "tenant",
        "id": record.id,
        "uid": record.key,
        **_fields(record, "created_at", *PLAIN, "limits", "models"),
        "keys": keys,
    }


def _fields(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(struct, name)) for name in names}


def _changed(record: TenantRecord, asked: Change) -> TenantRecord:
    given = {name: value for name in PLAIN if (value := getattr(asked, name)) is not msgspec.UNSET}
    if asked.limits is not msgspec.UNSET:
        given["limits"] = _limits("limits", record.limits, asked.limits)
    if asked.models is not msgspec.UNSET:
        models = dict(record.models)
        for model, limits in asked.models.items():
            if limits is None:
                models.pop(model, None)
            else:
                models[model] = _limits(f"models.{model}", models.get(model, Limits()), limits)
        given["models"] = models
    return msgspec.structs.replace(record, **given)


def _limits(field: str, before: Limits, asked: dict[str, Any]) -> Limits:
    merged = {
        name: value
        for name, value in (msgspec.to_builtins(before) | asked).items()
        if value is not None
    }
    return convert(merged, Limits, field)


def _ending(key: Key, seconds: int | None, now: float) -> Key:
    if seconds is None:
        return key
    return msgspec.structs.replace(
        key, expires_at=min(now + seconds, key.expires_at or now + seconds)
    )


def _checked_id(name: str) -> None:
    try:
        checked_name(name)
    except errors.BadRequest as error:
        raise error.in_words_of({"x-tenant": "id"}) from None
    if name in RESERVED:
        raise errors.BadRequest.of("id", name, f"any name but {' and '.join(RESERVED)}")


def _days(raw: str) -> int:
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 3 and 1 <= int(raw) <= 400):
        raise errors.BadRequest.of("days", raw, "a whole number, 1…400")
    return int(raw)
