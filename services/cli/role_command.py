"""`headwater role`: changes the role of an engine of a running cluster over its gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from ..runtime.printable import shown
from ..runtime.role import ROLES
from .admin_client import AdminError, AdminKeyFile, AsJson, BaseUrl, call, open_gateway

Replica = Annotated[str, typer.Argument(help="The engine's id, as `headwater status` shows it.")]
Role = Annotated[
    str,
    typer.Argument(
        help="both, prefill (computes prompts and hands them over) or decode (continues them)."
    ),
]


def make_command(state_dir: Callable[[], Path]) -> Callable[..., None]:
    def role(
        replica: Replica,
        role: Role,
        *,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Change whether an engine computes prompts, continues them, or both; at once and without
        draining."""
        if role not in ROLES:
            raise AdminError(f"role is {role!r}; allowed: {' or '.join(ROLES)}")
        with open_gateway(state_dir, base_url, admin_key_file, needs_key=False) as client:
            changed = call(
                client, "POST", f"/replicas/{quote(replica, safe='')}/role", {"role": role}
            )
        print(
            json.dumps(changed)
            if as_json
            else f"{shown(replica)}: {changed['role']}, was {changed['role_before']}"
        )

    return role
