"""Parts of a step on a GPU, put together: over a whole model, or a pipeline stage of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from headwater.kernels.stage.stage_memory import StageMemory

from ...config import EngineConfig
from ...models.model import Model
from ...platforms.cuda import CudaPlatform
from ...weights.page_plan import PagePlan
from ..device.cuda_device import CudaDevice
from ..device.cuda_memory import CudaMemory
from ..device.step_shapes import StepShape, StepShapes
from ..drafter.cuda_drafter import CudaDrafter
from ..drafter.cuda_drafters import Drafted, NewDrafter
from ..drafter.none import NoDrafter
from ..entry.cuda_entry import CudaEntry, SentStep
from ..entry.device_rows import DeviceRows
from ..entry.result_memory import ResultMemory
from ..entry.step_buffers import StepBuffers
from ..exit.cuda_prompt_scores import CudaPromptScores
from ..exit.cuda_sample import CudaSample
from ..exit.cuda_send import CudaSend
from ..exit.device_head import DeviceHead
from ..exit.device_sampler import DeviceSampler
from ..exit.held_states import HeldStates
from ..exit.token_messages import NoTokenChannel, NoTokenSender, TokenChannel, TokenSender
from ..model.adapter_memory import AdapterMemory, NoAdapterMemory
from ..model.cuda_caches import CudaCaches
from ..model.device_model import DeviceModel
from ..model.device_states import states_of
from ..model.expert_counts import expert_counts_of
from ..model.kv_blocks import KvBlocks, layer_caches
from ..model.shown import NotShown
from ..ranks.host_stages import HostStages
from ..ranks.rank_adapters import RankAdapters
from ..step_executor import StepExecutor
from ..step_parts import Exit
from ..table.device_table import DeviceTable
from ..tiers.cuda_swapper import CudaSwapper
from ..tiers.none import NoTiers


class CudaExit(Exit[SentStep], Protocol):
    """See `Exit`."""

    def rehearse(self) -> None:
        """Launches its kernels while launches are recorded, not executed."""

    def rehearse_draws(self) -> None:
        """Launches draws that no shape of steps captures."""

    def prepare(self, shape: StepShape, hidden: torch.Tensor) -> None:
        """Captures the exit of decode steps of this shape."""


class CudaParts:
    """Parts of the steps of one executor."""

    def __init__(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        pages: PagePlan,
        blocks: KvBlocks,
        head: DeviceHead,
        drafting: NewDrafter,
        *,
        swapper: CudaSwapper | None = None,
        stages: StageMemory | None = None,
        hosts: HostStages | None = None,
        samples: bool = True,
    ) -> None:
        """`head`: the vocabulary head, which only a stage that samples uses. `stages`: memory
        shared with the other stages, of which the last `samples`; `hosts`: exchange with stages on
        other hosts."""
        device = platform.device
        channel: TokenChannel = NoTokenChannel() if hosts is None else hosts
        self.swapper = swapper
        self.device = CudaDevice(device, config)
        # The next stage goes on with all tokens.
        self.shapes = StepShapes(
            config, platform.plans, looks_at_all=drafting.looks_at_all or not samples
        )
        self.caches = CudaCaches(blocks)
        table = DeviceTable(config, device)
        num_parts = self.device.num_parts
        buffers = StepBuffers(config, self.shapes.max_tiles, device, num_parts)
        results = ResultMemory(config, num_parts, device)
        rows = DeviceRows(config, table, buffers, results, are_drafted=drafting.writes_drafts)
        graphs = self.device.new_graphs()
        self.layers = DeviceModel(
            decoder,
            platform,
            config,
            layer_caches(blocks, pages, decoder.config),
            table,
            buffers,
            self.shapes,
            graphs,
            group_of_layer=pages.group_of_layer,
            states=states_of(decoder, config, table, blocks),
            streams=hosts,
        )
        self.drafter: CudaDrafter = NoDrafter(config.max_draft_tokens)
        self.exit: CudaExit
        if samples:
            sampler = DeviceSampler(
                head,
                config.num_rows,
                config.max_positions,
                decoder.dtype,
                device,
                num_parts,
            )
            drafted = Drafted(self.device, self.layers, sampler, table)
            self.drafter = drafting.drafter(drafted, config, blocks.kv_caches[1:])
            self.layers.shown = self.drafter.shown
            model = decoder.config
            self.exit = CudaSample(
                decoder,
                sampler,
                CudaPromptScores(head, table, config.num_rows),
                HeldStates(config, model.vocab_size, model.hidden_size, decoder.dtype, device),
                table=table,
                buffers=buffers,
                shapes=self.shapes,
                rows=rows,
                results=results,
                graphs=graphs,
                tokens=NoTokenSender() if stages is None else TokenSender(stages, table, channel),
            )
        else:
            assert stages is not None
            self.exit = CudaSend(stages, table, self.shapes, num_parts, channel)
        self.entry = CudaEntry(
            table,
            buffers,
            self.shapes,
            rows,
            results,
            graphs,
            sends_all_rows=not isinstance(self.drafter.shown, NotShown),
        )
        self.tiers = NoTiers() if swapper is None else swapper
        self._can_draft = config.max_draft_tokens > 0
        self._expert_counts = expert_counts_of(decoder)

    def executor(
        self,
        adapters: AdapterMemory | RankAdapters | None,
        releasable: CudaMemory | None = None,
        on_prepared: Callable[[], None] = lambda: None,
    ) -> StepExecutor[SentStep, StepShape]:
        """The executor of these parts; `adapters`: those behind the model's layers; `releasable`:
        memory that sleep gives back; `on_prepared` is called when all likely steps are captured."""
        self.device.begin()
        return StepExecutor(
            device=self.device,
            caches=self.caches,
            entry=self.entry,
            layers=self.layers,
            exit=self.exit,
            drafter=self.drafter,
            tiers=self.tiers,
            adapters=adapters or NoAdapterMemory(),
            # Those of several ranks are their executor's.
            host_adapters=adapters if isinstance(adapters, AdapterMemory) else None,
            swapper=self.swapper,
            expert_counts=self._expert_counts,
            preparations=chain(
                self._preparations(),
                (on_prepared,),
                () if releasable is None else releasable.copies(),
            ),
            releasable=releasable,
        )

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs all kernels of likely steps without launching them: one layer of each shape, and
        each way to sample."""
        for shape in self.shapes.for_each_kernel():
            self.layers.rehearse(shape)
        if self._can_draft:
            self.entry.rehearse()
        self.exit.rehearse()
        self.caches.rehearse()
        self.drafter.rehearse()
        self.tiers.rehearse()

    def _preparations(self) -> Iterator[Callable[[], object]]:
        """Captures of likely shapes, those that every engine needs first."""
        for i, shape in enumerate(self.shapes.likely()):
            if i == self.shapes.num_first:
                # All stages prepare equally many times.
                yield self.exit.rehearse_draws
            yield partial(self._prepare, shape)

    def _prepare(self, shape: StepShape) -> None:
        # Between requests, when the buffers hold a step of another shape.
        self.entry.clear(shape)
        hidden = self.layers.prepare(shape)
        if shape.is_decode:
            self.drafter.prepare(shape)
            self.exit.prepare(shape, hidden)
