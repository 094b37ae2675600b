"""The queue policies, for stages that see nothing else of the engine core."""

from __future__ import annotations

from headwater.engine_core.first_come import Arrival, FirstComeFirstServed
from headwater.engine_core.queue_policies import (
    DEFAULT,
    PROMOTION_SECONDS,
    Facts,
    Policies,
    Policy,
    PolicyError,
)
from headwater.engine_core.refusals import Due, refusals
from headwater.engine_core.tenant_turns import TenantTurns

__all__ = [
    "DEFAULT",
    "PROMOTION_SECONDS",
    "Arrival",
    "Due",
    "Facts",
    "FirstComeFirstServed",
    "Policies",
    "Policy",
    "PolicyError",
    "TenantTurns",
    "refusals",
]
