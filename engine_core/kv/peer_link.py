"""Messages between an engine core and its link to other engines, when one of them pulls blocks from
another.

The link moves records of blocks from one engine's buffers into another's. It is trusted with
nothing else: which blocks a pull brought, and whether they are whole, is verified in the core that
asked for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..executor import UInt8Array
from ..request import Holder
from .block_record import BlockSeal
from .block_source import Owner
from .prefix_hash import num_common


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Consecutive blocks of a chain."""

    key: bytes
    """Everything that their bits depend on beside the tokens: see `kv_key`."""
    owner: Owner
    parent: bytes
    """The hash before the first of them; empty at the start of the chain."""
    hashes: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Blocks that an engine lends. It claims them before and after the copy: blocks in both were
    not overwritten."""

    key: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    """How often each block had been handed out."""

    def num_common(self, other: Claim) -> int:
        """Leading blocks that are the same in both."""
        same_hashes = num_common(self.hashes, other.hashes)
        same_generations = num_common(self.generations, other.generations)
        return min(same_hashes, same_generations)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Message to the link: bring these blocks from an engine. Answered by one `Pulled`, always."""

    pull: int
    """Names the pull; never used again."""
    holder: Holder
    wanted: Wanted
    rows: list[int]
    """Rows of the buffers for the records; the link may write to them until it has answered."""
    is_direct: bool = False
    """Whether locations are wanted instead of records, for copies by this engine itself: the link
    sends `Placed`, receives `PullCopied` and then answers. It answers at once where blocks cannot
    be located."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullCopied:
    """Message to the link: the blocks of a direct pull were copied. Their claim is to be made
    again."""

    pull: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullEnd:
    """Message to the link: the core waits for this pull no more. The link answers it all the
    same."""

    pull: int
    num_copied: int = 0
    """Blocks of a direct pull that were copied, where no second claim is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Message from the link: a pull is over. Of what both claims name, the records are in their
    rows."""

    pull: int
    before: Claim
    after: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Addresses of blocks in an engine's KV cache."""

    handle: bytes
    """Handle by which the cache is opened: see `DirectCopies`."""
    blocks: list[int]
    published: bytes = b""
    """Handle of the memory in which the engine publishes its blocks, see `PublishedBlocks`; empty:
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Message from the link: addresses of the blocks of a direct pull, valid while the pull is
    open."""

    pull: int
    before: Claim
    places: Places


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderLeft:
    """Message from the link: the session with an engine is over, since nothing was pulled for long
    or since it is gone."""

    holder: Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Message from the link: another engine asks for blocks. Answered by one `Lent`, unless the
    lease ends first. A direct lease is answered by one with locations and a second one after
    `LeaseCopied`, or by one without."""

    lease: int
    """Names the lease; never used again."""
    wanted: Wanted
    is_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Message to the link: the records are in these rows of the buffers and stay there until the
    lease ends."""

    lease: int
    rows: list[int]
    before: Claim
    after: Claim
    places: Places | None = None
    """Addresses of the blocks of a direct lease while it lasts; a second `Lent` brings `after`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCopied:
    """Message from the link: the other engine has copied the blocks from their places."""

    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnd:
    """Message from the link: the records are sent, or the engine that asked needs nothing more or
    is gone."""

    lease: int
    num_copied: int = 0
    """Number of blocks that it copied directly and has checked itself."""


ToLink = PullRequest | PullCopied | PullEnd | Lent
FromLink = Placed | Pulled | HolderLeft | LeaseRequest | LeaseCopied | LeaseEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The core's end of the link."""

    key: bytes
    """Key of this engine's blocks: numerics and layout."""
    seal: BlockSeal
    """Seals records that are lent, and verifies those that are pulled."""
    records: UInt8Array
    """[rows, HEADER_LEN + bytes of a block], shared with the link: the first half for blocks that
    are lent, the others for blocks that are pulled."""
    send: Callable[[ToLink], None]
    """Called in the step loop."""

    def refuse(self, lease: int) -> None:
        """Answers a lease of which no block is lent."""
        self.send(Lent(lease=lease, rows=[], before=Claim(key=self.key), after=Claim()))
