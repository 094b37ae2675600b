"""The cost of sending a request to a replica, in seconds, part by part. Knows nothing about
choosing."""

from __future__ import annotations

import msgspec

PRESSURE_SECONDS = 0.15
MAX_FILLED = 0.98
ADAPTER_SECONDS = 0.005
"""Seconds to bring an adapter to a device: its copy from host memory (88 MB of rank 16 for 8B take
2 ms), and that of the adapter it evicts, when that is wanted again."""
GUARD_FILLED = 0.95
"""Share of KV blocks in use above which a replica takes no more, while another one can."""


class Parts(msgspec.Struct, frozen=True, gc=False):
    """One candidate's cost."""

    drain: float
    """Time until the prompts that were sent there before are prefilled."""
    own: float
    """This request's prefill, and the time until its cached tokens are on the device."""
    pressure: float
    """Cost of the shortage of KV blocks: a replica that runs out preempts."""
    slow: float
    """A decode step, with this request in the batch."""
    matched_tokens: int
    """Tokens of the prompt that the replica is believed to have."""
    num_requests: int
    """Requests of all gateways at the replica."""
    filled: float
    """Share of KV blocks that would be in use."""
    hand_over: float = 0.0
    """Time from the first token until another replica has the prompt's last blocks and has computed
    a step, where this one computes prompts for others."""
    adapter: float = 0.0
    """Seconds until the request's adapter is on the device, where it may evict another one; 0: it
    has none, or it is there."""
    stall: float = 0.0
    """Seconds by which this prefill delays the requests that decode meanwhile, where others compute
    prompts for this one."""
    evict: float = 0.0
    """Seconds to compute again what this request's tokens evict."""


TIMES = ("drain", "own", "pressure", "slow", "hand_over", "adapter", "stall", "evict")
"""Parts in seconds, as receipts name them."""


def pressure(filled: float) -> float:
    """Seconds: 0.15 at half, one at seven eighths."""
    k = min(MAX_FILLED, filled)
    return PRESSURE_SECONDS * k / (1 - k)
