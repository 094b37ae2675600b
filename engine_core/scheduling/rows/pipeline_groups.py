"""Rows in as many disjoint groups as an engine has pipeline stages: while a stage computes one
group, the next stage computes another. A step computes rows of one group, and groups take turns.
Knows no requests.
"""

from __future__ import annotations

import numpy as np

from ...executor import Int32Array
from ..table.masks import RowIndices


class PipelineGroups:
    def __init__(self, num_groups: int, num_rows: int) -> None:
        self._of_rows: Int32Array = np.zeros(num_rows, np.int32)
        self._sizes = [0] * num_groups
        self._turn = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def advance(self) -> None:
        """Gives the next group its turn."""
        self._turn = (self._turn + 1) % len(self._sizes)

    def has_room(self, num_requests: int) -> bool:
        """Whether the group whose turn it is may take one more of the `num_requests` requests that
        are shared out among the groups."""
        return self._sizes[self._turn] < -(-num_requests // len(self._sizes))

    def seat(self, row: int) -> None:
        """The row joins the group whose turn it is."""
        self._of_rows[row] = self._turn
        self._sizes[self._turn] += 1

    def leave(self, row: int) -> None:
        self._sizes[self._of_rows[row]] -= 1

    def has_turn(self, row: int) -> bool:
        return bool(self._of_rows[row] == self._turn)

    def of_turn(self, rows: RowIndices) -> RowIndices:
        """Rows of the group whose turn it is."""
        own: RowIndices = rows[self._of_rows[rows] == self._turn]
        return own


class OneGroup:
    """The only group of an engine without pipeline stages: it has every turn and holds all rows."""

    def __len__(self) -> int:
        return 1

    def advance(self) -> None: ...

    def has_room(self, num_requests: int) -> bool:
        return True

    def seat(self, row: int) -> None: ...

    def leave(self, row: int) -> None: ...

    def has_turn(self, row: int) -> bool:
        return True

    def of_turn(self, rows: RowIndices) -> RowIndices:
        return rows


def row_groups(num_groups: int, num_rows: int) -> PipelineGroups | OneGroup:
    return PipelineGroups(num_groups, num_rows) if num_groups > 1 else OneGroup()
