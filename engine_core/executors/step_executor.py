"""Computes plans on a device: the order of a step's parts. Knows nothing of kinds of devices, of
stages or of what drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from ..executor import (
    DrawPlan,
    HostAdapters,
    ReleasableMemory,
    ReplaceableWeights,
    StepPlan,
    StepResult,
    Swapper,
)
from ..expert_figures import ExpertFigures
from .model.adapter_memory import NoAdapterMemory
from .model.expert_counts import ExpertCounts, NoExpertCounts
from .step_parts import (
    Adapters,
    Caches,
    Device,
    Drafter,
    Entry,
    Exit,
    Layers,
    Read,
    Sent,
    Taken,
    Tiers,
)

NO_SLOTS = NoAdapterMemory()
NO_EXPERTS = NoExpertCounts()


@dataclass(frozen=True, slots=True)
class Launched:
    """A step or a draw in flight."""

    step: int
    read: Read
    is_draw: bool = False


class StepExecutor(Generic[Sent, Taken]):
    """See `Executor`. Each step's words are sent first, since drafting reads them; what another
    stage sends can only be taken afterwards."""

    copies_blocks = True
    prefill_seconds = 0.0
    """Depends on the model and the machine."""

    def __init__(
        self,
        *,
        device: Device,
        caches: Caches,
        entry: Entry[Sent, Taken],
        layers: Layers[Taken],
        exit: Exit[Sent],
        drafter: Drafter[Sent],
        tiers: Tiers,
        adapters: Adapters = NO_SLOTS,
        host_adapters: HostAdapters | None = None,
        swapper: Swapper | None = None,
        expert_counts: ExpertCounts | NoExpertCounts = NO_EXPERTS,
        preparations: Iterable[Callable[[], object]] = (),
        releasable: ReleasableMemory | None = None,
        replaceable: ReplaceableWeights
        | str = "allowed: an engine of one process on a CPU, of a model's folder",
    ) -> None:
        """`tiers`: those whose blocks the swapper copies. `host_adapters`: adapters in host memory
        that `adapters` copies from; None: the executor has no slots. `preparations`: each makes
        later steps faster. `releasable`: see `Sleeps`; `replaceable`: see `TakesWeights`."""
        self.swapper = swapper
        self.releasable = releasable
        self.replaceable = replaceable
        self._device = device
        self._caches = caches
        self._entry = entry
        self._layers = layers
        self._exit = exit
        self._drafter = drafter
        self._tiers = tiers
        self._adapters = adapters
        self.host_adapters = host_adapters
        self._expert_counts = expert_counts
        self._preparations = deque(preparations)
        self._in_flight: deque[Launched] = deque()

    @property
    def can_draft(self) -> bool:
        return self._drafter.most > 0

    @property
    def computes_at_once(self) -> bool:
        return self._device.computes_at_once

    @property
    def kv_caches(self) -> Sequence[torch.Tensor]:
        """See `Caches`."""
        return self._caches.kv_caches

    def expert_figures(self) -> ExpertFigures | None:
        """See `ExpertExecutor`."""
        return self._expert_counts.figures()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> int:
        with self._device.launching():
            self._tiers.precede(plan)
            self._exit.precede(plan)
            self._adapters.precede(plan)
            self._caches.copy(plan.copied_blocks)
            for admitted in plan.admitted:
                self._drafter.seat(admitted.row)
            sent = self._entry.send(plan)
            self._drafter.draft(sent)
            hidden = self._layers.hidden(self._entry.take(sent))
            read = self._exit.give(sent, hidden)
            self._drafter.see(sent, hidden)
            self._device.end(plan.step)
            self._expert_counts.note_step()
        self._in_flight.append(Launched(plan.step, read))
        return plan.step

    @torch.inference_mode()
    def draw(self, plan: DrawPlan) -> int:
        with self._device.launching():
            read = self._exit.draw(plan)
            self._device.end(plan.step)
        self._in_flight.append(Launched(plan.step, read, is_draw=True))
        return plan.step

    def retire(self, handle: int) -> StepResult:
        launched = self._in_flight.popleft()
        assert launched.step == handle
        self._device.wait(handle, spins=launched.is_draw)
        return launched.read()

    def is_ready(self, handle: int) -> bool:
        assert self._in_flight[0].step == handle
        return self._device.is_done(handle)

    def warm_up(self) -> float:
        seconds = self._device.warm_up(self)
        self._expert_counts.forget()
        return seconds

    @torch.inference_mode()
    def prepare(self) -> bool:
        if self._preparations:
            with self._device.launching():
                self._preparations.popleft()()
        return bool(self._preparations)

    def close(self) -> None:
        self._device.finish()
        self._in_flight.clear()
        self._exit.close()
        self._tiers.close()
