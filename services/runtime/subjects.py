"""Subjects of the bus. Names travel as hex keys, since they may contain `.`, `*` and `/`."""

from __future__ import annotations

from hashlib import blake2b

INBOXES = "_INBOX"
ENGINE_INBOXES = "_INBOX.engine"
"""Subjects below which answers come. Engines have their own: they may not read the answers of other
stages."""
HELLO = "ctl.hello"
"""Asks every process for a heartbeat now."""
EXPLAIN = "ctl.explain"
"""Asks every gateway for the timeline of a request."""
GATEWAY_DEMAND = "ctl.demand"
"""Tells every gateway the number of requests of one gateway, by model."""
BATCH_JOBS = "batch.jobs"
"""The work queue of batches; durable."""
BATCH_LINES = "batch.lines"
"""The work queue of their lines; durable."""
BACKGROUND_JOBS = "background.jobs"
"""The work queue of background responses; durable."""
BACKGROUND_EVENTS = "background.events"
"""Events of a background response; durable for a while."""
TENANTS_CHANGED = "ctl.tenants"
"""Tells every gateway to read the tenants again."""
ADAPTERS_CHANGED = "ctl.adapters"
"""Tells every gateway to read the catalogue of adapters again."""
GONE_TENANTS = "ctl.kv.tenants"
"""Asks any gateway which of some tenants are not there any longer."""
USAGE = "usage"
"""Usage records of a tenant, one a request; durable."""
USAGE_LEFT = "ctl.usage.left"
"""Tells every gateway the usage of a request whose gateway died."""
AUDIT = "audit.admin"
"""Audit log, one record a call of an administrator; durable."""
EVERY_MEMBER = "member.>"
EVERY_DEMAND = "demand.>"
EVERY_CATALOGUE = "catalogue.>"
EVERY_LOAD = "load.>"
EVERY_KV_EVENT = "kv.>"
EVERY_IN_FLIGHT = "inflight.>"
EVERY_DOUBT = "doubts.>"


def key_of(name: str) -> str:
    """The key of a replica or another named thing; a model's key is `ServedModel.key`."""
    return blake2b(name.encode(), digest_size=8).hexdigest()


def member(kind: str, replica_id: str) -> str:
    return f"member.{kind}.{key_of(replica_id)}"


def load(model_key: str, replica_id: str) -> str:
    return f"load.{model_key}.{key_of(replica_id)}"


def in_flight(epoch: int) -> str:
    """Subject of the requests that one gateway's router has under way."""
    return f"inflight.{epoch:016x}"


def doubts(epoch: int) -> str:
    """Subject of the engines at which one gateway has doubted requests."""
    return f"doubts.{epoch:016x}"


def backlog(model_key: str, epoch: int) -> str:
    """Subject of the number of tokens that wait at one gateway for a model."""
    return f"backlog.{model_key}.{epoch:016x}"


def every_backlog(model_key: str) -> str:
    return f"backlog.{model_key}.>"


def kv_events(model_key: str, replica_id: str) -> str:
    return f"kv.{model_key}.{key_of(replica_id)}"


def demand(model_key: str) -> str:
    """Subject of the number of requests that wait for a replica of the model."""
    return f"demand.{model_key}"


def live_survey(name: str) -> str:
    """Subject on which every gateway is asked for what the console shows of it: `figures`,
    `prefixes`, `samples` or `settings`."""
    return f"ctl.live.{name}"


def live_answers(name: str, gateway_id: str) -> str:
    """Subject of the answers of other gateways to one that asked."""
    return f"{live_survey(name)}.{key_of(gateway_id)}"


def catalogue(supervisor_id: str) -> str:
    """Subject of a supervisor's catalogue of models."""
    return f"catalogue.{key_of(supervisor_id)}"


def models_control(supervisor_id: str) -> str:
    """Subject on which a supervisor takes requests to load and unload models."""
    return f"ctl.models.{key_of(supervisor_id)}"


def supervisor_facts(supervisor_id: str) -> str:
    """Subject on which a supervisor reports on its machine: settings, disks, logs."""
    return f"{models_control(supervisor_id)}.facts"


def usage(tenant_id: str) -> str:
    return f"{USAGE}.{tenant_id.encode().hex()}"


def batch_lines(batch_id: str, first: str) -> str:
    """Subject of lines of one batch, by the number of the first; `>`: all of them."""
    return f"{BATCH_LINES}.{batch_id}.{first}"


def background_events(tenant: str, response_id: str) -> str:
    """Subject of the events of one response of a tenant, by `Tenant.key`; `>`: of all its
    responses."""
    return f"{BACKGROUND_EVENTS}.{key_of(tenant)}.{response_id}"
