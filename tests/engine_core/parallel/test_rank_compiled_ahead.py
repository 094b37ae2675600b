"""A rank on a GPU that drafts: it is built of all its parts, and what it launches is compiled
before it launches anything, while no other rank waits. Kernels are noted, not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.build import cuda as build_cuda
from headwater.engine_core.executors.build import cuda_drafting
from headwater.engine_core.executors.build.cuda import build_cuda_executor
from headwater.engine_core.executors.build.cuda_model import LoadedHeads
from headwater.engine_core.executors.build.cuda_rank import LoadedRank, LoadedRankDraft
from headwater.engine_core.executors.build.gpu_memory import Memory
from headwater.engine_core.executors.build.rank_weights import draft_layout
from headwater.engine_core.executors.entry.cuda_entry import SentStep
from headwater.engine_core.executors.entry.device_rows import DeviceGains
from headwater.engine_core.executors.ranks.rank import Rank
from headwater.engine_core.executors.ranks.stage_link import StageLinks
from headwater.engine_core.heads.checkpoint import HeadsFile
from headwater.engine_core.heads.heads_config import HeadsConfig
from headwater.engine_core.heads.registry import CLASSES
from headwater.engine_core.layers.leaf_matrix import keep_leaves
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.options import BuildRequest, ExecutorOptions
from headwater.engine_core.platforms.cuda import CudaPlatform
from headwater.engine_core.platforms.peer_group import PeerGroup
from headwater.engine_core.weights.layout import Layout
from headwater.engine_core.weights.page_plan import one_group
from headwater.engine_core.weights.shards import Shard, Stage, local_config
from headwater.kernels.peer.peer_memory import PeerMemory, new_numbers
from headwater.kernels.sampling.sample import Candidates
from tests.engine_core.published_heads import LAYER, publish
from tests.engine_core.test_compiled_ahead import (
    CONFIG,
    MODEL,
    Launches,
    launches,
    nothing_gained,
    serve_at_random,
)
from tests.long_values import long_but

__all__ = ["launches"]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
SERVED = replace(MODEL, num_layers=4)
ROOM = Memory(total=1 << 40, others=0, weights=0, step=0)
REQUEST = BuildRequest(
    options=ExecutorOptions(model_folder=None, tensor_parallel_size=2),
    model=SERVED,
    dtype="bfloat16",
    kv_format="bfloat16",
    activations="bfloat16",
)
EAGLE = LAYER | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": SERVED.vocab_size,
    "bias": False,
}
HEADS = {
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
    "eagle": EAGLE,
    "eagle3": EAGLE | {"draft_vocab_size": 3000, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}


class Host:
    """The group over host memory of a rank whose other one says what it says."""

    index = 0
    size = 2

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=1)


@pytest.fixture
def _no_gpu(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(cls: type[CudaPlatform], model: object, config: EngineConfig) -> CudaPlatform:
        sizes = {"max_decodes": config.max_positions, "max_model_len": config.max_model_len}
        return cls(model, config.block_size, **sizes, device=CPU)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaPlatform, "of", classmethod(on_cpu))
    monkeypatch.setattr(DeviceGains, "read", nothing_gained)
    for module in (build_cuda, cuda_drafting):
        monkeypatch.setattr(module, "measure", lambda *given, **more: ROOM)


def zeros(layout: Layout, shard: Shard) -> Weights:
    tensors = {
        name: torch.zeros(spec.shape, dtype=DTYPE)
        for name, spec in layout.items()
        if not spec.tied_to
    }
    return load_weights(layout, tensors, DTYPE, shard)


def served(shard: Shard, group: PeerGroup, *, is_tree: bool) -> LoadedRank:
    layout = Decoder.layout(SERVED)
    weights = zeros(layout, shard)
    if is_tree:
        weights = keep_leaves(weights, layout, shard)
    stage = Stage(0, 4, 4)
    links = StageLinks()
    rank = Rank(
        shard=shard,
        stage_index=0,
        stage=stage,
        group=group,
        links=links,
        slots=-1,
        exchange=-1,
        adapters=-1,
        warn=print,
    )
    request = replace(REQUEST, is_tree=is_tree)
    config = local_config(SERVED, shard)
    return LoadedRank(config, weights, DTYPE, is_tree, request, rank, group, Host(), None)


def draft(shard: Shard, group: PeerGroup) -> LoadedRankDraft:
    request = replace(REQUEST, model=MODEL)
    weights = zeros(draft_layout(request), shard)
    return LoadedRankDraft(MODEL, weights, DTYPE, False, request, shard, group)


def heads(kind: str, shard: Shard, path: Path) -> LoadedHeads:
    config = HeadsConfig.from_hf(HEADS[kind], SERVED)
    shapes, _ = CLASSES[kind].published(config, SERVED)
    tensors = {
        name: torch.zeros(shape, dtype=DTYPE) for name, shape in shapes.items() if name != "d2t"
    }
    if "d2t" in shapes:
        # Every sixth token, so that both ranks have some.
        tensors["d2t"] = 5 * torch.arange(config.draft_vocab_size)
    file = HeadsFile(publish(path / kind, HEADS[kind], tensors))
    # Copies: memory of a file is not aligned as a GPU's is.
    own = {
        name: tensor.clone() for name, tensor in CLASSES[kind].collect(file, config, DTYPE).items()
    }
    return LoadedHeads(
        config,
        load_weights(CLASSES[kind].layout(config, SERVED, own.keys()), own, DTYPE, shard),
        shard,
    )


class NotedGroup(PeerGroup):
    """Notes the exchanges of a rank, in their order."""

    def __init__(self, shard: Shard) -> None:
        bases = torch.zeros(shard.size, dtype=torch.int64)
        numbers = new_numbers("cpu")
        memory = PeerMemory(
            index=shard.index, bases=bases, numbers=numbers, slot_bytes=1 << 15, flagged_len=1024
        )
        super().__init__(memory)
        self.noted: list[tuple[str, tuple[int, ...]]] = []

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.noted.append(("sum", tuple(x.shape)))
        return super().sum(x)

    def tree_sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.noted.append(("tree sum", tuple(x.shape)))
        return super().tree_sum(x, dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        self.noted.append(("join", tuple(x.shape)))
        return super().join(x)

    def sum_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        dependent: bool,
    ) -> torch.Tensor:
        self.noted.append(("sum and norm", tuple(x.shape)))
        return super().sum_add_rms_norm(x, residual, weight, eps, dependent=dependent)

    def best(self, candidates: Candidates, num_stretches: int, out: torch.Tensor) -> None:
        self.noted.append(("best", tuple(out.shape)))
        super().best(candidates, num_stretches, out)


def run_rank(
    launches: Launches, kind: str, shard: Shard, path: Path, *, is_tree: bool
) -> NotedGroup:
    """Builds a rank and has it serve. What it launches then has been compiled, and it has
    drafted."""
    group = NotedGroup(shard)
    launches.seen.clear()
    device, config = build_cuda_executor(
        served(shard, group, is_tree=is_tree),
        replace(CONFIG, num_blocks=200),
        one_group(SERVED),
        CPU,
        draft=draft(shard, group) if kind == "draft model" else None,
        heads=None if kind == "draft model" else heads(kind, shard, path / str(shard.index)),
        kv_cache_memory=0,
        gpu_memory_utilization=0.9,
        is_sized=True,
    )
    ahead = set(launches.seen)
    num_drafted = 0
    drafted = device._drafter.draft

    def counted(sent: SentStep) -> None:
        nonlocal num_drafted
        num_drafts = sent.plan.num_drafts
        num_drafted += num_drafts is not None and bool(num_drafts.any())
        drafted(sent)

    device._drafter.draft = counted  # type: ignore[method-assign]
    serve_at_random(device, config)
    late = launches.seen - ahead
    assert not late, "\n".join(sorted(str(each)[:400] for each in late))
    assert num_drafted > 20
    return group


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("numerics", long_but(("default", "tree"), "default"))
@pytest.mark.parametrize("kind", long_but(("draft model", *HEADS), "draft model"))
@pytest.mark.long
def test_ranks_that_draft_exchange_the_same_and_compile_nothing_while_another_waits(
    launches: Launches, kind: str, numerics: str, tmp_path: Path
) -> None:
    first, last = (
        run_rank(launches, kind, Shard(i, 2), tmp_path, is_tree=numerics == "tree")
        for i in range(2)
    )
    assert first.noted == last.noted
