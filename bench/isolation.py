"""Measures whether a tenant notices another tenant's cached prefixes: times to first token on a
cluster of its own with a simulated engine.

Prompts that another tenant has just sent alternate with new prompts and, to show the size of the
effect, prompts that the tenant itself has sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Annotated

import numpy as np
import typer

from headwater.services.stack.cluster_record import ClusterRecord

from .own_cluster import own_cluster
from .program import run_program
from .sse_client import SseConnection

RESAMPLES = 2000


async def run(cluster: ClusterRecord, rounds: int, prompt_len: int) -> dict[str, list[float]]:
    """Seconds to the first token by kind of prompt."""
    dice, connection = random.Random(0), await SseConnection.open(cluster.rest)
    found: dict[str, list[float]] = {"cold": [], "another's": [], "own": []}

    async def ask(tenant: str, prompt: list[int]) -> float:
        body = {"model": cluster.model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        outcome = await connection.call("/v1/completions", body, {"x-tenant": tenant})
        if outcome.error:
            raise typer.BadParameter(outcome.error)
        return outcome.ttft

    for _ in range(rounds):
        shared, fresh = (
            [dice.randrange(1000, 40_000) for _ in range(prompt_len)] for _ in range(2)
        )
        await ask("ada", shared)
        kinds = [("another's", shared), ("cold", fresh)]
        dice.shuffle(kinds)
        for kind, prompt in kinds:
            found[kind].append(await ask("bob", prompt))
        found["own"].append(await ask("bob", shared))
    connection.close()
    return found


def difference(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Difference of the medians, in seconds, of values that belong together in pairs; and the
    bounds of its 95 % interval."""
    pairs = np.array([one, other])
    dice = np.random.default_rng(0)
    picks = dice.integers(0, len(one), (RESAMPLES, len(one)))
    medians = np.median(pairs[:, picks], axis=2)
    low, high = np.percentile(medians[0] - medians[1], (2.5, 97.5))
    return float(np.median(one) - np.median(other)), float(low), float(high)


def main(
    rounds: Annotated[int, typer.Option(help="prompts of each kind")] = 200,
    prompt_len: Annotated[int, typer.Option(help="tokens")] = 512,
    prefill_us: Annotated[float, typer.Option(help="what a prompt token costs the engine")] = 50.0,
) -> None:
    """Percentiles of each kind, and what another's cached prefix changes, with its 95 % interval;
    as JSON."""
    os.environ["HEADWATER_SIMULATED_PREFILL_SECONDS"] = str(prefill_us / 1e6)
    with own_cluster(["--executor=simulated", "--replicas=1", "--log-level=error"]) as (cluster, _):
        found = asyncio.run(run(cluster, rounds, prompt_len))
    ttft_seconds = {
        kind: {f"p{q}": round(float(np.percentile(each, q)), 5) for q in (10, 50, 90)}
        for kind, each in found.items()
    }
    change, low, high = difference(found["another's"], found["cold"])
    interval = [round(low, 5), round(high, 5)]
    print(
        json.dumps(
            {
                "ttft_seconds": ttft_seconds,
                "another's_less_cold": round(change, 5),
                "interval": interval,
            }
        )
    )


if __name__ == "__main__":
    run_program(main)
