"""The program behind `headwater platform check`: the conformance suite on one platform, then the
demo model's greedy tokens, and a table of all that was compared. Ends with status 0 where
everything passed, 1 elsewhere."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headwater.engine_core.config import ConfigError
from headwater.engine_core.conformance.case import Line
from headwater.engine_core.conformance.model import examine_model
from headwater.engine_core.conformance.suite import PARTS, operation_lines
from headwater.engine_core.platforms import loading
from headwater.engine_core.platforms.loading import LoadedDevice

from ...models.demo_model import DEMO_NAME
from ...models.store import ConversionFailed, default_cache_dir, pull
from ...models.wheel_model import WheelModelError
from ...runtime.hardware import resolve_dtype
from ...runtime.printable import shown
from ...runtime.progress import ProgressBars, Report
from ...runtime.settings import SettingError, read_settings, require, setting
from ...text.model import ServingChoices, load_text_model

TEXTS = (
    "a",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Der Himmel ist heute",
    '{"name": "river", "length_km":',
    "Water flows downhill because of gravity. Rivers carry sediment to the sea. " * 3,
)
"""Prompts that the demo model continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Compares a platform's operations with their specification, and its answers with those of a
    reference."""

    device: str = setting("", "name of the platform")
    dtype: tuple[str, ...] = setting(
        (), "types of weights to check the operations in; none: all that it serves"
    )
    part: tuple[str, ...] = setting((), f"parts of the operations: {', '.join(PARTS)}; none: all")
    model: bool = setting(True, "check the demo model's greedy tokens too")
    json: bool = setting(False, "print JSON, for scripts")
    cache_dir: Path | None = setting(
        None, "folder of models; default: HEADWATER_CACHE, ~/.cache/headwater"
    )

    def __post_init__(self) -> None:
        for part in self.part:
            require(part in PARTS, "part", part, " or ".join(PARTS))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table and the type of the weights that it was examined with."""

    dtype: str
    line: Line


def check(settings: CheckSettings, report: Report) -> tuple[LoadedDevice, list[Row]]:
    """Raises `ConfigError` for a platform that is refused, and what pulling the demo model
    raises."""
    loaded = loading.load(settings.device)
    served = loaded.device.capabilities.dtypes
    for dtype in settings.dtype:
        if dtype not in served:
            raise ConfigError(
                "dtype", dtype, f"{' or '.join(served)} on the platform {settings.device}"
            )
    rows = []
    for dtype in settings.dtype or served:
        for line in operation_lines(loaded.device, dtype, settings.part or PARTS):
            rows.append(Row(dtype, line))
            report(f"operations in {dtype}", len(rows), len(rows) + 1)
        report(f"operations in {dtype}", 1, 1)
    if settings.model:
        rows += _model_rows(settings, loaded, report)
    return loaded, rows


def _model_rows(settings: CheckSettings, loaded: LoadedDevice, report: Report) -> Iterator[Row]:
    """Rows of the model check, in the type that `auto` is on this machine, or the first that is
    asked for or served."""
    flags = loaded.device.capabilities
    device = loaded.device.name
    allowed = settings.dtype or flags.dtypes
    usual = resolve_dtype("auto", device)
    dtype = usual if usual in allowed else allowed[0]
    cache_dir = settings.cache_dir or default_cache_dir()
    folder = pull(DEMO_NAME, cache_dir=cache_dir, progress=report, dtype=dtype, device=device)
    tokenizer = load_text_model(folder, DEMO_NAME, ServingChoices()).tokenizer
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    yield Row(dtype, examine_model(folder, device, flags, prompts, report))


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("operation", "dtype", "shapes", "worst error", "allowed", "bits", "verdict"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("worst error", "allowed") else "left"
        )
    for row in rows:
        line = row.line
        verdict = (
            "[green]passed[/]" if line.passed else f"[red]FAILED[/] {shown(line.problem)}".rstrip()
        )
        numbers = f"{line.error:.1e}", f"{line.allowed:.1e}"
        table.add_row(line.operation, row.dtype, line.shapes, *numbers, line.bits, verdict)
    return table


def as_json(loaded: LoadedDevice, rows: Sequence[Row], *, has_model: bool) -> dict[str, Any]:
    origin = loaded.registration
    return {
        "platform": origin.name,
        "distribution": origin.distribution or "headwater",
        "version": origin.version,
        "api": loaded.device.api,
        "model": DEMO_NAME if has_model else None,
        "passed": all(row.line.passed for row in rows),
        "operations": [
            {
                "operation": row.line.operation,
                "dtype": row.dtype,
                "shapes": row.line.shapes,
                "error": row.line.error if math.isfinite(row.line.error) else None,
                "allowed": row.line.allowed,
                "bits": row.line.bits,
                "problem": row.line.problem,
                "passed": row.line.passed,
            }
            for row in rows
        ],
    }


def main() -> None:
    console = Console(stderr=True)
    try:
        settings = read_settings(
            CheckSettings, sys.argv[1:], env={}, prog="headwater platform check"
        )
        with ProgressBars(console) as bars:
            loaded, rows = check(settings, bars.report)
    except (ConfigError, SettingError, WheelModelError, ConversionFailed) as error:
        console.print(f"[red]headwater:[/] {shown(str(error))}", soft_wrap=True)
        sys.exit(1)
    failed = [row.line.operation for row in rows if not row.line.passed]
    if settings.json:
        print(json.dumps(as_json(loaded, rows, has_model=settings.model), indent=2))
    else:
        out = Console(width=None if sys.stdout.isatty() else 200)
        out.print(as_table(rows))
        if not settings.model:
            out.print("the demo model was not checked (--no-model)")
        summary = f"{len(failed)} of {len(rows)} failed" if failed else f"all {len(rows)} passed"
        out.print(f"platform {settings.device}: {summary}")
    sys.exit(int(bool(failed)))


if __name__ == "__main__":
    main()
