"""Replays the questions of a cluster through routing policies, on replicas as fast and as large as
its engines.

The figures of real processes can so be compared with those predicted for them, and for another
policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from tests.simulation.cluster.processes import ENVIRONMENT
from tests.simulation.cluster.questions import SHRINK, Question
from tests.simulation.policy_replay import OURS, Outcome, replay
from tests.simulation.routing_traces import BLOCK_SIZE, Arrival
from tests.simulation.simulated_replica import Hardware
from tests.simulation.virtual_loop import run_virtually

POLICIES = (OURS, "round robin")
ENGINE_BLOCK = 16
PIECE = BLOCK_SIZE // SHRINK
"""Number of a question's tokens that stand for a block of the replay."""


def replayed(questions: Sequence[Question], num_replicas: int) -> list[Outcome]:
    """Outcome of each policy, in virtual time. NOTE: it runs a loop of its own."""
    arrivals = [_arrival(each) for each in questions]
    hardware = _hardware()
    return [
        run_virtually(replay(arrivals, each, "cluster", hardware, num_replicas), 0)
        for each in POLICIES
    ]


def _arrival(question: Question) -> Arrival:
    """An arrival with the trace's lengths again: the replay's blocks have one size."""
    prompt = question.body["prompt"]
    hashes = list[bytes]()
    chain = b""
    for start in range(0, len(prompt) - PIECE + 1, PIECE):
        chain = blake2b(
            chain + repr(prompt[start : start + PIECE]).encode(), digest_size=16
        ).digest()
        hashes.append(chain)
    return Arrival(
        question.number, question.at, len(prompt) * SHRINK, question.body["max_tokens"], hashes
    )


def _hardware() -> Hardware:
    """Speed and size of a simulated engine: a prompt takes a step and the time of its tokens."""
    num_tokens = int(ENVIRONMENT["HEADWATER_NUM_BLOCKS"]) * ENGINE_BLOCK
    return Hardware(
        num_blocks=math.floor(num_tokens / PIECE),
        prefill_tps=SHRINK / float(ENVIRONMENT["HEADWATER_SIMULATED_PREFILL_SECONDS"]),
        itl_seconds=float(ENVIRONMENT["HEADWATER_SIMULATED_STEP_SECONDS"]),
    )
