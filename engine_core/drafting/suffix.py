"""Drafts the tokens that followed a row's last tokens in earlier answers of its namespace.

The method is SuffixDecoding (Oliaro et al., 2024), which keeps those answers in suffix trees. Here
they are kept in rings with hash chains, which find the same: the frequency of each token after the
longest matches. A ring forgets its oldest tokens by itself, and its memory is known to the byte.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import numpy.typing as npt

from headwater.kernels.cpu.suffix_match import MIN_MATCH, history_drafter

from ..executor import Int32Array
from .history import NUM_FIELDS, History
from .proposer import Proposal

SMALLEST_HISTORY = 1 << 8
"""Number of tokens in the smallest history. A history doubles each time that it is full."""
NO_HISTORY = -1


class SuffixProposer:
    """One history a namespace. All histories together hold `max_tokens`: when one grows, the least
    recently used histories of the tenant with the most tokens are dropped. A single history holds
    at most half of the tokens, and then forgets its oldest ones."""

    name = "suffix"

    def __init__(self, num_rows: int, max_drafts: int, max_tokens: int = 1 << 20) -> None:
        """max_drafts: largest number of drafted tokens of a row and step."""
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens
        self._largest = 1 << (max_tokens // 2).bit_length() - 1
        self._smallest = min(SMALLEST_HISTORY, self._largest)
        self._histories: dict[bytes, tuple[int, History]] = {}
        """Keyed by namespace: index in `_fields`, and the history."""
        self._owner: dict[bytes, str] = {}
        """Keyed by namespace: the tenant whose answers made the history."""
        self._used: dict[str, OrderedDict[bytes, None]] = {}
        """Keyed by tenant: the namespaces of its histories, the one used last at the end."""
        self._num_tokens_of: Counter[str] = Counter()
        """Keyed by tenant: sum of the capacities of its histories, in tokens."""
        num_histories = max_tokens // self._smallest
        self._fields: npt.NDArray[np.int64] = np.zeros((num_histories, NUM_FIELDS), np.int64)
        self._free = list(reversed(range(num_histories)))
        self._namespaces: list[bytes | None] = [None] * num_rows
        self._tenants = [""] * num_rows
        self._num_prompt = [0] * num_rows
        self._history_of_row: Int32Array = np.full(num_rows, NO_HISTORY, np.int32)
        self._draft = history_drafter()
        # The first call of machine code takes milliseconds, which no step has.
        none = np.zeros(0, np.int32)
        self.propose(none, np.zeros((1, 1), np.int32), none, none)
        History(self._smallest).learn(none)

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        """Lets the row draft from the history of its namespace, which may still be empty."""
        self._namespaces[row] = namespace
        self._tenants[row] = tenant
        self._num_prompt[row] = num_prompt
        found = self._histories.get(namespace)
        self._history_of_row[row] = NO_HISTORY if found is None else found[0]
        if found is not None:
            self._use(namespace)

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        """Adds the answer, the tokens after the prompt, to the history. Of a preempted request it
        is the part that is known."""
        namespace = self._namespaces[row]
        answer = token_ids[self._num_prompt[row] :]
        self._namespaces[row] = None
        self._history_of_row[row] = NO_HISTORY
        if namespace is not None and len(answer) > MIN_MATCH:
            self._learn(namespace, self._tenants[row], answer)

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        """See `Proposer`."""
        drafts = np.zeros((len(rows), self._max_drafts), np.int32)
        num_drafts, match_lens = np.zeros((2, len(rows)), np.int32)
        histories = self._fields, self._history_of_row
        self._draft(token_ids, *histories, rows, num_known, most, drafts, num_drafts, match_lens)
        return Proposal(drafts, num_drafts, match_lens)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all histories and of the tables that find them."""
        histories = sum(history.num_bytes for _, history in self._histories.values())
        return histories + self._fields.nbytes + self._history_of_row.nbytes

    def _learn(self, namespace: bytes, tenant: str, answer: Int32Array) -> None:
        if namespace not in self._histories:
            self._add(namespace, tenant)
        self._use(namespace)
        index, history = self._histories[namespace]
        capacity = history.capacity
        while capacity < self._largest and history.end + len(answer) + 1 > capacity:
            capacity *= 2
        if capacity > history.capacity:
            self._reserve(namespace, capacity - history.capacity)
            history = history.grown(capacity)
            self._histories[namespace] = index, history
        history.learn(answer)
        self._fields[index] = history.fields

    def _use(self, namespace: bytes) -> None:
        self._used[self._owner[namespace]].move_to_end(namespace)

    def _add(self, namespace: bytes, tenant: str) -> None:
        self._owner[namespace] = tenant
        self._used.setdefault(tenant, OrderedDict())[namespace] = None
        self._reserve(namespace, self._smallest)
        index = self._free.pop()
        self._histories[namespace] = index, History(self._smallest)
        self._point_rows(namespace, index)

    def _reserve(self, namespace: bytes, num_tokens: int) -> None:
        """Reserves `num_tokens` more tokens for a namespace, dropping histories of others."""
        self._num_tokens_of[self._owner[namespace]] += num_tokens
        while self._num_tokens_of.total() > self._max_tokens:
            self._drop(self._least_wanted(namespace))

    def _least_wanted(self, kept: bytes) -> bytes:
        """Namespace, other than `kept`, that was used least recently of the tenant with the most
        tokens."""
        oldest = [next(iter(namespaces)) for namespaces in self._used.values()]
        others = [namespace for namespace in oldest if namespace != kept]
        return max(others, key=lambda namespace: self._num_tokens_of[self._owner[namespace]])

    def _drop(self, namespace: bytes) -> None:
        index, history = self._histories.pop(namespace)
        tenant = self._owner.pop(namespace)
        self._num_tokens_of[tenant] -= history.capacity
        del self._used[tenant][namespace]
        if not self._used[tenant]:
            del self._used[tenant], self._num_tokens_of[tenant]
        self._free.append(index)
        self._point_rows(namespace, NO_HISTORY)

    def _point_rows(self, namespace: bytes, index: int) -> None:
        for row, other in enumerate(self._namespaces):
            if other == namespace:
                self._history_of_row[row] = index
