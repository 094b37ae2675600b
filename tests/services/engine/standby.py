"""Stands by in place of `kernels.launch.standby` where there is no GPU: says that it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    Path(os.environ["HEADWATER_PROBE"]).write_text(f"{os.getpid()} {sys.argv[1]}")
