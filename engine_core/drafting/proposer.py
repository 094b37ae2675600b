"""The interface of a proposer, which drafts the tokens that follow the known ones. A wrong draft
costs time only.

Rows are those of the request table. Knows nothing about requests, steps or how drafts are
verified.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..executor import Int32Array


class Proposal(NamedTuple):
    """Tokens that may follow the known tokens of rows, one entry a row."""

    draft_ids: Int32Array
    """[R, K]; of row i the first num_drafts[i] count."""
    num_drafts: Int32Array
    """[R]"""
    match_lens: Int32Array
    """[R] number of last known tokens that matched; 0 where nothing is proposed."""


class Proposer(Protocol):
    """Called between steps, for all rows at once: together at most 10 µs a row."""

    name: str
    """Name in settings, requests and metrics."""

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        """Notes that a request takes the row; its first `num_prompt` tokens are the prompt. Data
        that outlives the row is shared within its namespace alone: the speed of an answer reveals
        shared data. The room for it is shared by tenants, who choose the number of their
        namespaces."""

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        """Notes that a request with these known tokens leaves its row."""

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        """Proposes tokens after the known tokens, token_ids[rows[i], : num_known[i]], of each of
        `rows` [R]: up to most[i] tokens, each of which was a known token of some row before.
        token_ids is int32 [rows of the table, length]; known tokens of a row do not change, more
        are added. All arrays are contiguous."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the proposer holds."""
