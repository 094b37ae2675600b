"""Addresses that `--base-url` and HEADWATER_BASE_URL name: of a gateway, or of the API below it."""

from __future__ import annotations

import httpx

from ..runtime.settings import require

API_PATH = "/v1"


def gateway_of(base_url: str) -> str:
    """Address of the gateway, for paths outside of the API. One variable serves all commands, and
    clients of OpenAI's end theirs with /v1. Raises `SettingError`."""
    return _checked(base_url).removesuffix(API_PATH)


def api_of(base_url: str) -> str:
    """Address of the API: `/v1` of an address without a path. Raises `SettingError`."""
    url = _checked(base_url)
    return url if httpx.URL(url).path.strip("/") else url + API_PATH


def _checked(base_url: str) -> str:
    require(
        base_url.startswith(("http://", "https://")),
        "base_url",
        base_url,
        "an address with http:// or https://",
    )
    return base_url.rstrip("/")
