"""Parts of a step on a device, with the verbs that `StepExecutor` calls in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from ..executor import DrawPlan, Executor, Int32Array, StepPlan, StepResult

Sent = TypeVar("Sent")
"""A step whose words are on the device."""
Sent_contra = TypeVar("Sent_contra", contravariant=True)
Taken = TypeVar("Taken")
"""Inputs of a step as its layers read them."""
Taken_co = TypeVar("Taken_co", covariant=True)
Taken_contra = TypeVar("Taken_contra", contravariant=True)
Read = Callable[[], StepResult]
"""Reads the result of a step or a draw, once the device is done with it."""


class Device(Protocol):
    """Device on which steps are computed."""

    @property
    def computes_at_once(self) -> bool:
        """See `Executor`."""

    def launching(self) -> AbstractContextManager[object]:
        """Scope of launches of steps."""

    def end(self, step: int) -> None:
        """Notes that all of a step or a draw is launched; within the scope of its launches."""

    def is_done(self, step: int) -> bool:
        """Whether the device has computed a step whose launches have ended (see `end`)."""

    def wait(self, step: int, *, spins: bool) -> None:
        """Returns when the step is computed. `spins`: looks for its end for a while without
        sleeping."""

    def finish(self) -> None:
        """Returns when nothing is launched any more."""

    def warm_up(self, executor: Executor) -> float:
        """See `Executor`."""


class Caches(Protocol):
    """The KV caches of the served model and of what drafts, in this order."""

    @property
    def kv_caches(self) -> Sequence[torch.Tensor]:
        """[layers, 2, num_blocks, Hk, block_size, D] of each."""

    def copy(self, pairs: Int32Array) -> None:
        """Copies blocks: pairs [C, 2], from and to."""


class Adapters(Protocol):
    """Adapters in slots of the device."""

    def precede(self, plan: StepPlan) -> None:
        """Copies the plan's adapters to their slots."""


class Entry(Protocol[Sent, Taken_co]):
    """The words of a step on their way to the device."""

    def send(self, plan: StepPlan) -> Sent:
        """Changes the request table as the plan says, and sends the step's words."""

    def take(self, sent: Sent) -> Taken_co:
        """Completes the words, once drafts are in the table, for the layers."""


class Layers(Protocol[Taken_contra]):
    """The model layers of this stage."""

    def hidden(self, taken: Taken_contra) -> torch.Tensor:
        """Hidden states [T, H] of all tokens, or of the wanted positions of each row."""


class Exit(Protocol[Sent_contra]):
    """End of a step, after its layers."""

    def precede(self, plan: StepPlan) -> None:
        """Writes tokens that earlier steps sampled into the request table, as far as the plan reads
        them, and forgets the rows that it releases."""

    def give(self, sent: Sent_contra, hidden: torch.Tensor) -> Read:
        """Launches what the plan needs of its hidden states: scores, vectors, rows to hold,
        tokens."""

    def draw(self, plan: DrawPlan) -> Read:
        """Launches the draw of held rows."""

    def close(self) -> None:
        """Releases its resources; nothing is launched afterwards."""


class Drafter(Protocol[Sent_contra]):
    """Drafts tokens on the device. What it drafts changes no token of an answer."""

    @property
    def most(self) -> int:
        """Drafts of one row and step, at most."""

    def seat(self, row: int) -> None:
        """Notes that another request takes a row of the request table."""

    def draft(self, sent: Sent_contra) -> None:
        """Writes the drafts that the plan leaves to the executor into the request table, after the
        known tokens."""

    def see(self, sent: Sent_contra, hidden: torch.Tensor) -> None:
        """Reads the hidden states of a step after its tokens are sampled."""


class Tiers(Protocol):
    """Copies of KV blocks to host memory and back, beside the steps."""

    def precede(self, plan: StepPlan) -> None:
        """Makes the step wait for copies that read blocks which it writes."""

    def close(self) -> None:
        """Ends the copies."""
