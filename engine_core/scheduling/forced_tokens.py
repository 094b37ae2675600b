"""Tokens that grammars force, until a step is planned: masks come with them between steps."""

from __future__ import annotations

import numpy as np

from .rows.rows import Rows


class ForcedTokens:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._noted: list[tuple[int, int, int, list[int]]] = []
        """Row, ticket, output index of the first token, tokens."""

    def note(
        self,
        rows: list[int],
        tickets: list[int],
        output_indices: list[int],
        forced_ids: list[list[int]],
    ) -> None:
        """Notes the tokens forced_ids[i] from output output_indices[i] of the request on that got
        the ticket."""
        self._noted += zip(rows, tickets, output_indices, forced_ids, strict=True)

    def pass_on(self) -> None:
        """Shows the speculator what is noted, but tokens that have become known since."""
        if not self._noted:
            return
        table = self._rows.table
        found = dict[int, list[int]]()
        for row, ticket, output_index, forced_ids in self._noted:
            first = int(table.num_prompt[row]) + output_index
            end = int(table.num_known[row])
            is_right = table.token_ids[row, first:end].tolist() == forced_ids[: end - first]
            if (
                table.held.tickets[row] == ticket
                and first <= end < first + len(forced_ids)
                and is_right
            ):
                found[row] = forced_ids[end - first :]
        self._noted.clear()
        if found:
            self._rows.speculator.foresee(table, np.array(list(found)), list(found.values()))
