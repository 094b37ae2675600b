"""`headwater tenant`: manages the tenants of a cluster over its gateway, with an administrator's
key."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..runtime.printable import shown
from .admin_client import AdminKeyFile, AsJson, BaseUrl, open_gateway
from .plain_table import show_as
from .tenant_client import BYTES, LIMITS, TenantClient, tenant_table, tenants_table, usage_table

Name = Annotated[str, typer.Argument(help="Name of the tenant.")]
Weight = Annotated[
    float | None, typer.Option(help="Share of the cluster relative to other tenants.")
]
Tier = Annotated[int | None, typer.Option(help="Strict priority: a lower number goes first.")]
TtftGoal = Annotated[
    int | None,
    typer.Option(help="Milliseconds to the first token, for the policy slo; 0: no goal."),
]
TpotGoal = Annotated[
    int | None,
    typer.Option(help="Milliseconds of each later token, for the policy slo; 0: no goal."),
]
Shared = Annotated[
    bool | None,
    typer.Option(
        "--shared-cache/--own-cache",
        help="Share cached prefixes with other tenants that do so too.",
    ),
]
Escape = Annotated[
    bool | None,
    typer.Option(
        "--escape-special-tokens/--model-special-tokens",
        help="Read special tokens in its messages and tools as plain text, or as the model's "
        "processors are set.",
    ),
]
Model = Annotated[str | None, typer.Option(help="Set the limits for this model alone.")]
Rpm = Annotated[
    int | None, typer.Option(help="Requests in any 60 seconds; -1 removes a limit, here and below.")
]
Tpm = Annotated[int | None, typer.Option(help="Tokens of prompts and answers in any 60 seconds.")]
Concurrency = Annotated[
    int | None, typer.Option(help="Choices at once: each prompt of a request, times n or best_of.")
]
Budget = Annotated[
    int | None, typer.Option(help="Tokens of prompts and answers in a --budget-period.")
]

FileBytes = Annotated[
    int | None,
    typer.Option(
        help="Bytes of files, batches and background responses; -1: the default of all tenants."
    ),
]
ResponseBytes = Annotated[
    int | None,
    typer.Option(help="Bytes of responses and conversations; -1: the default of all tenants."),
]
Adapters = Annotated[
    int | None,
    typer.Option(help="Adapters that it may bring; -1: the default of all tenants."),
]
AdapterBytes = Annotated[
    int | None,
    typer.Option(help="Bytes of adapters that it brings; -1: the default of all tenants."),
]

PLAIN = (
    "weight",
    "tier",
    "ttft_goal_ms",
    "tpot_goal_ms",
    "shared_cache",
    "escape_special_tokens",
)


class Period(StrEnum):
    DAY = "day"
    MONTH = "month"


BudgetPeriod = Annotated[Period | None, typer.Option(help="Calendar day or month, in UTC.")]


def make_commands(state_dir: Callable[[], Path]) -> typer.Typer:
    """`state_dir` says where the local cluster writes its addresses."""
    app = typer.Typer(no_args_is_help=True, help="Manage tenants: keys, limits, usage.")

    @contextlib.contextmanager
    def connected(base_url: str | None, key_file: Path | None) -> Iterator[TenantClient]:
        with open_gateway(state_dir, base_url, key_file, needs_key=True) as client:
            yield TenantClient(client)

    @app.command()
    def add(
        tenant: Name,
        *,
        weight: Weight = None,
        tier: Tier = None,
        ttft_goal_ms: TtftGoal = None,
        tpot_goal_ms: TpotGoal = None,
        shared_cache: Shared = None,
        escape_special_tokens: Escape = None,
        requests_per_minute: Rpm = None,
        tokens_per_minute: Tpm = None,
        concurrency: Concurrency = None,
        budget: Budget = None,
        budget_period: BudgetPeriod = None,
        file_bytes: FileBytes = None,
        response_bytes: ResponseBytes = None,
        adapters: Adapters = None,
        adapter_bytes: AdapterBytes = None,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Add a tenant and print its key, which is never shown again."""
        settings = _settings(locals())
        with connected(base_url, admin_key_file) as client:
            _print_key(client.add(tenant, settings), as_json)

    @app.command("list")
    def list_all(
        *, as_json: AsJson = False, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None
    ) -> None:
        """List all tenants with their limits."""
        with connected(base_url, admin_key_file) as client:
            show_as(tenants := client.all(), lambda: tenants_table(tenants), as_json)

    @app.command()
    def show(
        tenant: Name,
        *,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Show one tenant with its limits and keys."""
        with connected(base_url, admin_key_file) as client:
            show_as(found := client.show(tenant), lambda: tenant_table(found), as_json)

    @app.command("set")
    def set_(
        tenant: Name,
        *,
        model: Model = None,
        weight: Weight = None,
        tier: Tier = None,
        ttft_goal_ms: TtftGoal = None,
        tpot_goal_ms: TpotGoal = None,
        shared_cache: Shared = None,
        escape_special_tokens: Escape = None,
        requests_per_minute: Rpm = None,
        tokens_per_minute: Tpm = None,
        concurrency: Concurrency = None,
        budget: Budget = None,
        budget_period: BudgetPeriod = None,
        file_bytes: FileBytes = None,
        response_bytes: ResponseBytes = None,
        adapters: Adapters = None,
        adapter_bytes: AdapterBytes = None,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Change the settings that are given and leave the others."""
        settings = _settings(locals())
        if model is not None:
            settings["models"] = {model: settings.pop("limits", {})}
        with connected(base_url, admin_key_file) as client:
            show_as(
                changed := client.set(tenant, settings), lambda: tenants_table([changed]), as_json
            )
            if model is not None:
                warn_of_unknown(model, client.served_models())

    @app.command("rotate-key")
    def rotate_key(
        tenant: Name,
        *,
        grace: Annotated[int, typer.Option(help="Seconds for which the old keys still work.")] = 0,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Make a new key, print it once, and expire the old keys."""
        with connected(base_url, admin_key_file) as client:
            _print_key(client.rotate_key(tenant, grace), as_json)

    @app.command()
    def remove(
        tenant: Name, *, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None
    ) -> None:
        """Remove a tenant: its keys stop working, what it stored is deleted, its usage records are
        kept."""
        with connected(base_url, admin_key_file) as client:
            client.remove(tenant)

    @app.command()
    def usage(
        tenant: Name,
        *,
        days: Annotated[int, typer.Option(help="Days to show, today included.")] = 31,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Show a tenant's requests and tokens by day and model."""
        with connected(base_url, admin_key_file) as client:
            show_as(rows := client.usage(tenant, days), lambda: usage_table(rows), as_json)

    return app


def warn_of_unknown(model: str, served: list[str]) -> None:
    """Limits may be set before a model is loaded, so an unknown name is no error."""
    if served and model not in served:
        text = (
            f"no model {shown(model)} is served now (served: {shown(', '.join(served))}); the "
            "limits wait for one"
        )
        Console(stderr=True).print(f"[yellow]warning:[/] {text}", soft_wrap=True, highlight=False)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings that the command line gave, as fields of /admin."""
    limits = {name: given[name] for name in LIMITS if given[name] is not None}
    limits = {name: None if value == -1 else value for name, value in limits.items()}
    settings = {name: given[name] for name in PLAIN if given[name] is not None}
    settings |= {
        name: None if given[name] == -1 else given[name]
        for name in BYTES
        if given[name] is not None
    }
    return settings | ({"limits": limits} if limits else {})


def _print_key(answer: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(answer, indent=2) if as_json else answer["key"])
