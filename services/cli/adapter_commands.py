"""`headwater models load-adapter` and its siblings: adapters of a running cluster, over its
gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from ..runtime.printable import printable, shown
from .admin_client import AdminKeyFile, AsJson, BaseUrl, call, open_gateway
from .plain_table import plain_table, show_as

Name = Annotated[str, typer.Argument(help="Name that clients send as a model.")]

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
        folder: Annotated[
            Path, typer.Argument(help="Folder in PEFT's layout, on the engines' machines.")
        ],
        *,
        base: Annotated[
            str, typer.Option(help="Served model that it belongs to; default: the only one.")
        ] = "",
        tenant: Tenants = None,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Load an adapter; returns when every engine of its model serves it."""
        asked: dict[str, Any] = {
            "name": name,
            "folder": str(folder.expanduser().absolute()),
            "base": base,
        }
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
    table = plain_table("adapter", "base", "rank", "digest", "replicas", numbers=("rank",))
    for each in adapters:
        replicas = ", ".join(map(shown, each["replicas"]))
        table.add_row(
            shown(each["id"]), shown(each["base"]), str(each["rank"]), each["digest"], replicas
        )
    return table
