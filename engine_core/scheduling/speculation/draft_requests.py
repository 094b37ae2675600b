"""Drafts that the requests of rows ask for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...executor import BoolArray, Int32Array
from ..table.request_state import RequestState
from .look_up import ANY


class DraftRequests:
    """Columns with one entry a row of the request table."""

    def __init__(self, names: Sequence[str], num_rows: int, max_drafts: int, device: int) -> None:
        """`names`: of the proposers. `device`: index of the one that the executor has as well;
        `ANY`: it has none of them."""
        self._names = list(names)
        self._max_drafts = max_drafts
        self._device = device
        self.is_seated: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows that a request has."""
        self.may_run_ahead: BoolArray = np.zeros(num_rows, np.bool_)
        """Rows whose drafts the executor may make."""
        self.most: Int32Array = np.zeros(num_rows, np.int32)
        """Drafts that each row's request allows."""
        self.wanted: Int32Array = np.full(num_rows, ANY, np.int32)
        """The proposer that each row's request names."""

    def seat(self, request: RequestState) -> None:
        row = request.row
        asked = request.speculation
        is_served = asked.is_on and asked.drafter in ("", *self._names)
        most = min(asked.max_tokens or self._max_drafts, self._max_drafts)
        self.most[row] = most if is_served else 0
        is_named = is_served and asked.drafter
        self.wanted[row] = self._names.index(asked.drafter) if is_named else ANY
        self.is_seated[row] = True
        is_ahead = self._device != ANY and self.wanted[row] in (ANY, self._device)
        # Masks of a grammar are filled for drafts that are known.
        self.may_run_ahead[row] = is_served and is_ahead and not request.has_grammar

    def vacate(self, row: int) -> None:
        self.is_seated[row] = self.may_run_ahead[row] = False
        self.most[row] = 0

    @property
    def may_all_run_ahead(self) -> bool:
        """Whether the executor may make the drafts of all rows that want any."""
        return bool(self.may_run_ahead[self.is_seated & (self.most > 0)].all())
