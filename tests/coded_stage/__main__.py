"""A stage that runs the code which its only argument is."""

from __future__ import annotations

import sys

PROGRAM = "tests.coded_stage"


def main() -> None:
    exec(sys.argv[1], {})


if __name__ == "__main__":
    main()
