"""Client of a gateway's /admin for commands: finds the gateway and the key, returns an answer or
says why not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from ..runtime.owner_file import read_secrets
from ..stack.cluster_record import read_cluster
from .base_url import gateway_of
from .cluster_unreachable import WITHOUT_ANSWER, unreached

CALL_SECONDS = 30.0

BaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="HEADWATER_BASE_URL", help="The gateway's REST address; default: the local one."
    ),
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADWATER_ADMIN_KEY_FILE",
        help="File whose first key is used; HEADWATER_ADMIN_KEY wins over it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


class AdminError(Exception):
    """The gateway refused, or was not asked; the message says why, in a sentence."""


@contextlib.contextmanager
def open_gateway(
    state_dir: Callable[[], Path], base_url: str | None, key_file: Path | None, *, needs_key: bool
) -> Iterator[httpx.Client]:
    """The gateway that `base_url` names, else the local cluster's. Raises `AdminError` without a
    key, or an answer."""
    key = _admin_key(key_file)
    if needs_key and not key:
        raise AdminError(
            "an administrator's key is needed: set HEADWATER_ADMIN_KEY, or give --admin-key-file"
        )
    line = read_cluster(Path(os.environ.get("HEADWATER_STATE_DIR") or state_dir()))
    url = (
        gateway_of(base_url)
        if base_url
        else (line.rest if line is not None else "http://127.0.0.1:8000")
    )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=CALL_SECONDS) as client:
            yield client
    except WITHOUT_ANSWER as failure:
        raise AdminError(unreached(url, failure)) from None


def call(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Raises `AdminError` with what the gateway says of an error."""
    reply = client.request(method, f"/admin{path}", json=body)
    try:
        answer: dict[str, Any] = reply.json()
    except ValueError:
        # A proxy before the gateway, say.
        raise AdminError(
            f"{reply.url} answered {reply.status_code}, and not as a gateway does"
        ) from None
    if reply.is_error:
        raise AdminError(
            answer.get("error", {}).get("message", f"the gateway answered {reply.status_code}")
        )
    return answer


def _admin_key(path: Path | None) -> str:
    """Key from the environment or the file: a flag would show it to everyone on the machine. Empty:
    there is none."""
    if key := os.environ.get("HEADWATER_ADMIN_KEY"):
        return key
    for line in read_secrets("admin_key_file", path).splitlines() if path is not None else ():
        words = line.split()
        if len(words) == 2 and not words[0].startswith("#"):
            return words[1]
    return ""
