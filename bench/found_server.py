"""The server that a benchmark uses: a named one, else this machine's, and its first model."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from headwater.services.stack.cluster_record import read_cluster
from headwater.services.stack.flags import default_state_dir

DEFAULT_URL = "http://127.0.0.1:8000"
ASK_SECONDS = 10.0


class ServerNotFound(Exception):
    """The server, or the name of a model that it serves, could not be found out; a sentence."""


def find_server(base_url: str | None, model: str | None, api_key: str = "") -> tuple[str, str]:
    """Base address and served name; what is None is found out. Raises `ServerNotFound`."""
    url = base_url or _local_url()
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    root = url.rstrip("/").removesuffix("/v1")
    try:
        reply = httpx.get(f"{root}/v1/models", headers=headers, timeout=ASK_SECONDS)
    except httpx.HTTPError as failure:
        what = (
            "no server answers"
            if isinstance(failure, httpx.ConnectError)
            else f"no answer ({failure})"
        )
        raise ServerNotFound(
            f"{what} at {url}; start a deployment with `headwater up`, or give --base-url"
        ) from None
    return url, model or _first_model(reply)


def _local_url() -> str:
    line = read_cluster(Path(os.environ.get("HEADWATER_STATE_DIR") or default_state_dir()))
    return line.rest if line is not None else DEFAULT_URL


def _first_model(reply: httpx.Response) -> str:
    """Raises `ServerNotFound`."""
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerNotFound(f"{reply.url} wants a key: set HEADWATER_API_KEY")
    try:
        models = reply.json()["data"]
        return str(models[0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ServerNotFound(
            f"{reply.url} lists no model (status {reply.status_code}); give --model"
        ) from None
