"""Writes `gpu_seconds.json` from results of runs of the GPU's suite with kernels to compile.

`python -m tests.gpu_seconds FILE…`, files of `headwater.bench.pytest_results`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.workers import GPU_SECONDS

LEAST_SECONDS = 15
OF_ONE_WORKER = ("tests/engine_core/parallel/", "tests/combinations/", "tests/line/")
"""Folders whose files are shared out whole."""


def longest_cases(lines: Iterable[str]) -> dict[str, int]:
    """Seconds of the longest case of each long test, the longest first."""
    cases = Counter[str]()
    for line in lines:
        report = json.loads(line)
        if "seconds" in report and not report["id"].startswith(OF_ONE_WORKER):
            cases[report["id"]] += report["seconds"]
    tests: dict[str, int] = {}
    for name, seconds in cases.most_common():
        if seconds >= LEAST_SECONDS:
            tests.setdefault(name.split("[", 1)[0], round(seconds))
    return tests


def main() -> None:
    lines = (line for name in sys.argv[1:] for line in Path(name).read_text().splitlines())
    GPU_SECONDS.write_text(json.dumps(longest_cases(lines), indent=1) + "\n")


if __name__ == "__main__":
    main()
