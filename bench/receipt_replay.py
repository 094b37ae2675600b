"""Scores logged routing decisions again: what another policy would have chosen from what the router saw.

`headwater bench replay FILE`: lines of a gateway's log; those that say `routed` hold a receipt each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headwater.bench.program import run_program
from headwater.gateway.router import policy
from headwater.gateway.router.cost import Parts

Receipt = dict[str, Any]

POLICIES: dict[str, Callable[[Parts], float]] = {
    "seconds": policy.seconds,
    "load only": policy.load_only,
    "overlap only": lambda parts: -float(parts.matched_tokens),
    "fewest requests": lambda parts: float(parts.num_requests),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one policy over all receipts."""

    policy: str
    num_decisions: int
    same: float
    """Share of decisions that it would have taken too."""
    seconds: float
    """Until a prompt is computed, predicted: the mean where this policy would have sent it."""
    matched_tokens: float
    """Cached there by the index; the mean."""


def receipts(path: Path) -> Iterator[Receipt]:
    """Raises `OSError`; lines that are no receipts are passed over."""
    with path.open() as lines:
        for line in lines:
            if '"routed"' in line:
                told = json.loads(line)
                if told.get("event") == "routed":
                    yield told["receipt"]


def parts_of(candidate: dict[str, Any]) -> Parts:
    return Parts(
        drain=candidate["drain_seconds"],
        own=candidate["own_seconds"],
        pressure=candidate["pressure_seconds"],
        slow=candidate["slow_seconds"],
        matched_tokens=candidate["matched_tokens"],
        num_requests=candidate["num_requests"],
        filled=candidate["filled"],
    )


def choice(receipt: Receipt, score: Callable[[Parts], float]) -> dict[str, Any]:
    """The candidate that a policy prefers; the one that was chosen where it is as good as the best."""
    able = [each for each in receipt["candidates"] if not each["guard"]] or receipt["candidates"]
    chosen = receipt["replica_id"]
    return min(able, key=lambda each: (score(parts_of(each)), each["replica_id"] != chosen))


def judge(log: list[Receipt], name: str) -> Verdict:
    choices = [choice(receipt, POLICIES[name]) for receipt in log]
    same = sum(each["replica_id"] == receipt["replica_id"] for each, receipt in zip(choices, log, strict=True))
    number = max(1, len(log))
    return Verdict(
        policy=name,
        num_decisions=len(log),
        same=round(same / number, 4),
        seconds=round(sum(each["drain_seconds"] + each["own_seconds"] for each in choices) / number, 6),
        matched_tokens=round(sum(each["matched_tokens"] for each in choices) / number, 1),
    )


def accuracy(log: list[Receipt]) -> dict[str, float]:
    """How predictions turned out: tokens found cached over predicted, seconds taken over predicted."""
    done = [each for each in log if each["actual_cached_tokens"] is not None]
    predicted_tokens = sum(each["predicted_cached_tokens"] for each in done)
    predicted_seconds = sum(each["predicted_prefill_seconds"] for each in done)
    return {
        "cached": round(sum(each["actual_cached_tokens"] for each in done) / max(1, predicted_tokens), 4),
        "seconds": round(sum(each["actual_prefill_seconds"] for each in done) / max(1e-9, predicted_seconds), 4),
    }


def main(
    log: Annotated[Path, typer.Argument(help="A gateway's log (JSON lines).", exists=True, dir_okay=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What other policies would have decided."""
    found = list(receipts(log))
    if not found:
        raise typer.BadParameter(f"no receipts in {log}")
    verdicts, turned_out = [judge(found, name) for name in POLICIES], accuracy(found)
    if as_json:
        typer.echo(json.dumps({"policies": [asdict(each) for each in verdicts], "actual_over_predicted": turned_out}))
        return
    table = Table("policy", "decisions", "same", "predicted s", "matched tokens")
    for each in verdicts:
        table.add_row(*map(str, asdict(each).values()))
    Console().print(table)
    Console().print(f"actual over predicted: cached tokens {turned_out['cached']}, seconds {turned_out['seconds']}")


if __name__ == "__main__":
    run_program(main)
