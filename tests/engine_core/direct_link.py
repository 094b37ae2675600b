"""Joins engines of this process, so that they pull blocks from each other without a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Executor
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.peer_link import (
    Claim,
    LeaseCopied,
    LeaseEnd,
    LeaseRequest,
    Lent,
    PeerLink,
    Placed,
    Places,
    PullCopied,
    Pulled,
    PullEnd,
    PullRequest,
    ToLink,
)
from headwater.engine_core.kv.tiers import block_bytes_of

SEAL = BlockSeal([b"s" * 32])
"""Of engines of one cluster."""


class DirectLink:
    """Engines by address. What is said to them is delivered by `pump`, between their steps."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._links: dict[str, PeerLink] = {}
        self._due: deque[Callable[[], None]] = deque()
        self._open: dict[int, tuple[str, PullRequest]] = {}
        """By lease: who pulls what."""
        self._leases = count(1)

    def end_of(
        self,
        address: str,
        key: bytes,
        config: EngineConfig,
        executor: Executor,
        seal: BlockSeal = SEAL,
    ) -> PeerLink | None:
        """An engine's end of the link; None where it has no memory for it."""
        if not config.num_peer_blocks:
            return None
        records = np.zeros(
            (config.num_peer_blocks, HEADER_LEN + block_bytes_of(executor)), np.uint8
        )
        self._links[address] = PeerLink(
            key=key,
            seal=seal,
            records=records,
            send=lambda message: self.send(address, message),
        )
        return self._links[address]

    def join(self, address: str, engine: Engine) -> None:
        self._engines[address] = engine

    def pump(self) -> None:
        """Delivers what is due, and lets engines that lend go on."""
        while self._due:
            self._due.popleft()()
        for address in {request.holder.address for _, request in self._open.values()}:
            self._engines[address].step()

    def send(self, sender: str, message: ToLink) -> None:
        """Takes what an engine says to others."""
        match message:
            case PullRequest():
                self._due.append(partial(self._ask, sender, message))
            case PullCopied(pull=pull):
                [lease] = [
                    lease for lease, (_, request) in self._open.items() if request.pull == pull
                ]
                owner = self._engines[self._open[lease][1].holder.address]
                self._due.append(partial(owner.take, LeaseCopied(lease=lease)))
            case Lent(places=Places() as places):
                # A pull that began to copy by itself may be over.
                if (found := self._open.get(message.lease)) is not None:
                    puller, request = found
                    placed = Placed(pull=request.pull, before=message.before, places=places)
                    self._due.append(partial(self._engines[puller].take, placed))
            case Lent():
                self._due.append(partial(self._carry, message))
            case PullEnd(pull=pull, num_copied=num_copied):
                # It must not overtake the request, whose lease would never end.
                self._due.append(partial(self._end, sender, pull, num_copied))

    def _ask(self, puller: str, request: PullRequest) -> None:
        lease = next(self._leases)
        self._open[lease] = puller, request
        asked = LeaseRequest(lease=lease, wanted=request.wanted, is_direct=request.is_direct)
        self._engines[request.holder.address].take(asked)

    def _end(self, sender: str, pull: int, num_copied: int) -> None:
        for lease, (puller, request) in list(self._open.items()):
            if (puller, request.pull) == (sender, pull):
                self._carry(Lent(lease=lease, rows=[], before=Claim(), after=Claim()), num_copied)

    def _carry(self, lent: Lent, num_copied: int = 0) -> None:
        if (found := self._open.pop(lent.lease, None)) is None:
            return
        puller, request = found
        owner = request.holder.address
        for source, target in zip(lent.rows, request.rows, strict=False):
            self._links[puller].records[target] = self._links[owner].records[source]
        self._engines[puller].take(Pulled(pull=request.pull, before=lent.before, after=lent.after))
        self._engines[owner].take(LeaseEnd(lease=lent.lease, num_copied=num_copied))
