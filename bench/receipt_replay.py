"""Scores logged routing decisions again: the choices of another policy from the same candidates.

`headwater bench replay FILE`: lines of a gateway's log; those that say `routed` hold a receipt
each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from headwater.gateway.router.cost import TIMES, Parts
from headwater.gateway.router.policy import POLICIES, Policy

from .figures import print_table
from .program import run_program
from .trace_file import TraceError, numbered_records


class RoutedCandidate(msgspec.Struct, frozen=True):
    """Replica in a receipt."""

    replica_id: str
    drain_seconds: float
    own_seconds: float
    pressure_seconds: float
    slow_seconds: float
    matched_tokens: int
    num_requests: int
    filled: float
    guard: str
    hand_over_seconds: float = 0.0
    adapter_seconds: float = 0.0
    stall_seconds: float = 0.0
    evict_seconds: float = 0.0

    @property
    def parts(self) -> Parts:
        seconds: dict[str, Any] = {name: getattr(self, f"{name}_seconds") for name in TIMES}
        counts = {"matched_tokens": self.matched_tokens, "num_requests": self.num_requests}
        return Parts(**seconds, **counts, filled=self.filled)


class Receipt(msgspec.Struct, frozen=True):
    """The fields of a logged decision that are read here."""

    replica_id: str
    candidates: Annotated[list[RoutedCandidate], msgspec.Meta(min_length=1)]
    predicted_cached_tokens: int
    actual_cached_tokens: int | None
    predicted_prefill_seconds: float
    actual_prefill_seconds: float | None


class LogLine(msgspec.Struct, frozen=True):
    """A line of a gateway's log."""

    event: str = ""
    receipt: Receipt | None = None


SCORED: Mapping[str, Policy] = {
    **POLICIES,
    "overlap": lambda parts: -float(parts.matched_tokens),
}
"""The gateway's policies, and one that looks at cached tokens alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one policy over all receipts."""

    policy: str
    num_decisions: int
    same: float
    """Share of decisions that it would have taken too."""
    seconds: float
    """Predicted mean seconds until a prompt is computed, at the replica that this policy would have
    chosen."""
    matched_tokens: float
    """Mean number of tokens that are cached there, by the index."""


def receipts(path: Path) -> Iterator[Receipt]:
    """Receipts in a log; other lines are skipped. Raises `TraceError`."""
    for number, line in numbered_records(path, LogLine, holding=b'"routed"'):
        if line.event == "routed":
            if line.receipt is None:
                raise TraceError(path, "Object missing required field `receipt`", number)
            yield line.receipt


def choice(receipt: Receipt, score: Policy) -> RoutedCandidate:
    """The candidate that a policy prefers; the one that was chosen where it is as good as the
    best."""
    able = [each for each in receipt.candidates if not each.guard] or receipt.candidates
    return min(able, key=lambda each: (score(each.parts), each.replica_id != receipt.replica_id))


def judge(log: list[Receipt], name: str) -> Verdict:
    choices = [choice(receipt, SCORED[name]) for receipt in log]
    same = sum(
        each.replica_id == receipt.replica_id for each, receipt in zip(choices, log, strict=True)
    )
    number = max(1, len(log))
    return Verdict(
        policy=name,
        num_decisions=len(log),
        same=round(same / number, 4),
        seconds=round(sum(each.drain_seconds + each.own_seconds for each in choices) / number, 6),
        matched_tokens=round(sum(each.matched_tokens for each in choices) / number, 1),
    )


def accuracy(log: list[Receipt]) -> dict[str, float]:
    """Accuracy of predictions: tokens found cached over predicted, seconds taken over predicted."""
    done = [
        (each, each.actual_cached_tokens, each.actual_prefill_seconds)
        for each in log
        if each.actual_cached_tokens is not None and each.actual_prefill_seconds is not None
    ]
    predicted_tokens = sum(each.predicted_cached_tokens for each, _, _ in done)
    predicted_seconds = sum(each.predicted_prefill_seconds for each, _, _ in done)
    return {
        "cached": round(sum(tokens for _, tokens, _ in done) / max(1, predicted_tokens), 4),
        "seconds": round(sum(seconds for _, _, seconds in done) / max(1e-9, predicted_seconds), 4),
    }


def main(
    log: Annotated[Path, typer.Argument(help="A gateway's log (JSON lines).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare logged decisions with those of other policies."""
    found = list(receipts(log))
    if not found:
        raise TraceError(log, "there are no receipts in it")
    verdicts = [judge(found, name) for name in SCORED]
    turned_out = accuracy(found)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "policies": [asdict(each) for each in verdicts],
                    "actual_over_predicted": turned_out,
                }
            )
        )
        return
    columns = ("policy", "decisions", "same", "predicted s", "matched tokens")
    print_table(columns, (asdict(each).values() for each in verdicts))
    Console().print(
        f"actual over predicted: cached tokens {turned_out['cached']}, seconds "
        f"{turned_out['seconds']}"
    )


if __name__ == "__main__":
    run_program(main)
