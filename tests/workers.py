"""Which worker runs what: a file with its fixtures is one worker's, and so is all that starts whole lines.

NOTE: not by `xdist_group`: its plugin writes a group into a name that this pytest does not read, and says nothing.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

LINES = "tests/line/"
"""One line after the other: each is many processes."""


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    return LINES if nodeid.startswith(LINES) else nodeid.split("::", 1)[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts, so that no worker waits for another at the end: the lines, files with a slow test, then the others."""
    slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, bool]:
        group = group_of(item.nodeid)
        return group != LINES, group not in slow

    items.sort(key=place)
