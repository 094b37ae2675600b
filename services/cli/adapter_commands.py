"""`headwater models load-adapter` and its siblings: adapters of a running cluster, over its
gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from ..models.adapter_folder import adapter_folder
from ..runtime.printable import printable, shown
from ..runtime.progress import ProgressBars
from .admin_client import AdminKeyFile, AsJson, BaseUrl, call, open_gateway
from .flags import option_of
from .plain_table import plain_table, show_as

Name = Annotated[str, typer.Argument(help="Name that clients send as a model.")]

CacheDir = Annotated[Path, option_of("cache_dir")]
Tenants = Annotated[
    list[str] | None,
    typer.Option(help="Tenant that may use it; may be repeated. Default: all tenants."),
]


def add_adapter_commands(app: typer.Typer, state_dir: Callable[[], Path]) -> None:
    """Adds the commands to those of models. `state_dir` says where the local cluster writes its
    addresses."""

    @app.command("load-adapter")
    def load(
        name: Name,
        place: Annotated[
            str,
            typer.Argument(
                help="Folder in PEFT's layout, on the engines' machines, or a Hugging Face id, "
                "which is downloaded to this machine."
            ),
        ],
        *,
        revision: Annotated[
            str | None, typer.Option(help="Commit, branch or tag of a Hugging Face id.")
        ] = None,
        base: Annotated[
            str, typer.Option(help="Served model that it belongs to; default: the only one.")
        ] = "",
        tenant: Tenants = None,
        cache_dir: CacheDir,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Load an adapter; returns when every engine of its model serves it."""
        with ProgressBars(Console(stderr=True)) as bars:
            folder = adapter_folder(
                place, revision=revision, cache_dir=cache_dir, progress=bars.report
            )
        asked: dict[str, Any] = {"name": name, "folder": str(folder), "base": base}
        asked |= {} if tenant is None else {"tenants": tenant}
        with open_gateway(state_dir, base_url, admin_key_file, needs_key=False) as client:
            card = call(client, "POST", "/adapters", asked)
        print(json.dumps(card, indent=2) if as_json else f"{printable(name)} is served")

    @app.command("unload-adapter")
    def unload(
        name: Name, *, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None
    ) -> None:
        """Unload an adapter: new requests do not find it, running ones keep it to their end."""
        with open_gateway(state_dir, base_url, admin_key_file, needs_key=False) as client:
            call(client, "DELETE", f"/adapters/{quote(name)}")

    @app.command("list-adapters")
    def list_all(
        *, as_json: AsJson = False, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None
    ) -> None:
        """List the adapters of the cluster."""
        with open_gateway(state_dir, base_url, admin_key_file, needs_key=False) as client:
            found: list[dict[str, Any]] = call(client, "GET", "/adapters")["data"]
        show_as(found, lambda: adapters_table(found), as_json)


def adapters_table(adapters: list[dict[str, Any]]) -> Table:
    columns = ("adapter", "base", "rank", "tenants", "digest", "replicas")
    table = plain_table(*columns, numbers=("rank",))
    for each in adapters:
        replicas = ", ".join(map(shown, each["replicas"]))
        rank = str(each["rank"])
        name = shown(each["id"])
        table.add_row(name, shown(each["base"]), rank, _tenants(each), each["digest"], replicas)
    return table


def _tenants(adapter: dict[str, Any]) -> str:
    """Tenants that may use an adapter: its owner, those that the operator named, or all."""
    if adapter["owner"] is not None:
        return f"its own: {shown(adapter['owner'])}"
    return "all" if adapter["tenants"] is None else ", ".join(map(shown, adapter["tenants"]))
