"""`headwater access FOLDER`: draws a deployment's passwords and token, into files that stages and
servers read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.cluster_key import make_token_file
from ..stack.access import MASTER_KEY_FILE, PASSWORDS_FILE, Passwords, ServerAccess, keep_master_key
from ..stack.roles import Role
from ..stack.token_file import TOKEN, TOKEN_FILE


def access(
    *,
    folder: Annotated[
        Path, typer.Argument(help="Folder for the files; files that exist are kept.")
    ],
    nats_url: Annotated[
        str, typer.Option(help="Address at which stages reach NATS.")
    ] = "nats://nats:4222",
    redis_url: Annotated[
        str, typer.Option(help="Address at which stages reach Redis.")
    ] = "redis://redis:6379",
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Generate new passwords; keep the token and the master key."),
    ] = False,
) -> None:
    """Generate passwords and the cluster's token, once, for a deployment that `headwater up` does
    not run.

    FOLDER/nats/nats.conf is for NATS, FOLDER/redis/users.acl for Redis.

    FOLDER/ROLE/stage.env is for a stage.

    Gateways take FOLDER/gateway/master.key as --master-key-file.
    """
    if renew:
        (folder / PASSWORDS_FILE).unlink(missing_ok=True)
    passwords = Passwords.kept(folder)
    token = folder / TOKEN_FILE
    if not token.exists():
        make_token_file(token)
    passwords.write_servers(folder)
    keep_master_key(folder / Role.GATEWAY.value / MASTER_KEY_FILE)
    tokens = " ".join(token.read_text().split())
    ServerAccess(nats_url, redis_url, passwords, passwords).write_stages(folder, {TOKEN: tokens})
    print(folder)
