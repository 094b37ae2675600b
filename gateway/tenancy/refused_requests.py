"""Counts requests that are refused before they are charged."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.services.runtime.errors import HeadwaterError

from .accounts import Accounts
from .grant import Standing
from .tenants import Identity, tenant_of


async def after_refusal(
    accounts: Accounts,
    tenants: Identity,
    headers: Mapping[str, str],
    standing: Standing,
    error: HeadwaterError,
) -> HeadwaterError:
    """Counts a refused request of an identified tenant. Returns the error to answer with."""
    try:
        tenant = tenant_of(tenants, headers)
    except HeadwaterError:
        return error
    return await accounts.after_refusal(tenant, standing, error)
