"""What an engine on a GPU launches is compiled ahead, all of it, before it launches anything:
neither a capture nor a step compiles a kernel. Kernels are not run here but noted, with all that
Triton compiles them for."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import DrawPlan, Int32Array
from headwater.engine_core.executors.build.cuda_drafting import NoDrafting
from headwater.engine_core.executors.build.cuda_model import LoadedModel
from headwater.engine_core.executors.build.cuda_rank import LoadedRank
from headwater.engine_core.executors.entry.device_rows import DeviceGains
from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout
from headwater.engine_core.executors.ranks.rank import Rank
from headwater.engine_core.executors.ranks.stage_link import StageLinks
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.layers.leaf_matrix import keep_leaves
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.process_group import Alone
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import BuildRequest, ExecutorOptions
from headwater.engine_core.platforms import cuda as cuda_platform
from headwater.engine_core.platforms.cuda_tree import TreePlatform
from headwater.engine_core.platforms.peer_group import PeerGroup
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.weights.mixed_layers import MixedLayers
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.page_plan import plan_pages
from headwater.engine_core.weights.shards import NUM_LEAVES, WHOLE, Shard, Stage, local_config
from headwater.kernels.attention import decode_attention, hopper_attention, prefill_attention
from headwater.kernels.attention import qk_norm_rope_store_kv as store_kernel
from headwater.kernels.gemm import gated_gemm, gemm, product_probe, tree_gemm, wide_gemm
from headwater.kernels.launch.compile_ahead import CompileAhead
from headwater.kernels.peer import peer_sum
from headwater.kernels.peer.peer_memory import PeerMemory, new_numbers, slot_bytes_of
from headwater.kernels.peer.peer_sum import GROUP_ROWS
from tests.engine_core.ahead_speculator import AheadSpeculator

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=20_000,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=2,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    max_position_embeddings=4000,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    qkv_bias=False,
)
CONFIG = EngineConfig(
    num_blocks=800,
    block_size=64,
    max_model_len=4000,
    max_num_seqs=96,
    max_num_batched_tokens=2048,
    max_draft_tokens=15,
)


class Launches:
    """What kernels were compiled for, in the place of compiling and running them."""

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()
        self.library_differs = False
        """For every product."""
        self._params: dict[object, list[KernelParam]] = {}

    def note_library(self) -> None:
        assert not self.library_differs, "asked for a product whose bits differ"

    def note(self, kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        params = self._params.get(kernel) or self._params.setdefault(kernel, _params(kernel))
        values = dict(zip((param.name for param in params), args, strict=False)) | options
        own = [
            _compiled_for(param, values.pop(param.name)) for param in params if param.name in values
        ]
        self.seen.add((kernel.fn.__module__, kernel.fn.__name__, *own, *sorted(values.items())))

    def arguments(self, kernel: Any, *names: str) -> set[tuple[Any, ...]]:
        """What a kernel was compiled for, by names of its arguments, all of which are given."""
        places = [2 + list(inspect.signature(kernel.fn).parameters).index(name) for name in names]
        noted = [
            seen for seen in self.seen if seen[:2] == (kernel.fn.__module__, kernel.fn.__name__)
        ]
        return {tuple(seen[place] for place in places) for seen in noted}


def _params(kernel: Any) -> list[KernelParam]:
    # What the decorator was told; Triton interprets or compiles the function by it.
    reported = kernel.kwargs if isinstance(kernel, InterpretedFunction) else vars(kernel)
    fixed = reported.get("do_not_specialize") or ()
    unaligned = reported.get("do_not_specialize_on_alignment") or ()
    if isinstance(kernel, JITFunction):
        return list(kernel.params)
    signature = inspect.signature(kernel.fn)
    return [
        KernelParam(i, p, p.name in fixed, p.name in unaligned)
        for i, p in enumerate(signature.parameters.values())
    ]


def _compiled_for(param: KernelParam, value: Any) -> object:
    """Triton's own rules: constants, types, and of what is neither whether it is 1 or divisible by
    16."""
    if param.is_constexpr:
        return value
    if isinstance(value, TensorDescriptor | GluonDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    is_aligned = not param.do_not_specialize_on_alignment
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            not param.do_not_specialize and is_aligned and value.data_ptr() % 16 == 0,
        )
    if isinstance(value, int) and not param.do_not_specialize:
        return "one" if value == 1 else (value.bit_length() > 31, is_aligned and value % 16 == 0)
    return type(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launches:
    """A GPU that computes nothing."""
    found = Launches()
    zeros = torch.zeros

    def run(kernel: object, *args: Any, **options: Any) -> None:
        found.note(kernel, *args, **options)

    def blank(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*size, **options)

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", run)
    event = SimpleNamespace(
        record=lambda stream: None, query=lambda: True, synchronize=lambda: None
    )
    graph = SimpleNamespace(
        capture_begin=lambda **options: None,
        capture_end=lambda: None,
        pool=lambda: None,
        replay=lambda: None,
    )
    stood_for: dict[str, Callable[..., object]] = {
        "Event": lambda **options: event,
        "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda device: None,
        "CUDAGraph": lambda **options: graph,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device: None,
    }
    for name, stand_in in stood_for.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, blank)
    monkeypatch.setattr(torch, "mm", lambda x, weight, out: found.note_library())
    monkeypatch.setattr(product_probe, "facts", lambda device: {})
    monkeypatch.setattr(
        product_probe,
        "differing",
        lambda counts, device, weights: set(counts) if found.library_differs else set(),
    )
    monkeypatch.setattr(wide_gemm, "num_multiprocessors", lambda device: 132)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(hopper_attention, "is_hopper", lambda device: True)
    monkeypatch.setattr(cuda_platform, "configure_blas", lambda: None)
    # Of so small a model many rows are not enough otherwise.
    monkeypatch.setattr(gated_gemm, "MIN_TILES", 100)
    return found


def prepared(
    config: EngineConfig,
    *,
    is_tree: bool = False,
    shard: Shard = WHOLE,
    model: ModelConfig = MODEL,
) -> tuple[cuda_platform.CudaPlatform, Weights]:
    platform = (TreePlatform if is_tree else cuda_platform.CudaPlatform)(
        local_config(model, shard),
        config.block_size,
        max_decodes=config.max_positions,
        max_model_len=config.max_model_len,
        device=torch.device("cpu"),
    )
    layout = model_class(model).layout(model)
    tensors = {
        name: torch.zeros(spec.shape, dtype=torch.bfloat16)
        for name, spec in layout.items()
        if not spec.tied_to
    }
    weights = load_weights(layout, tensors, torch.bfloat16, shard)
    weights = keep_leaves(weights, layout, shard) if is_tree else weights
    platform.products.prepare(weights, (17, config.max_num_batched_tokens), (17, 256))
    return platform, weights


def executor(
    config: EngineConfig,
    kv_dtype: torch.dtype,
    *,
    is_tree: bool = False,
    num_ranks: int = 1,
    model: ModelConfig = MODEL,
) -> StepExecutor[Any, Any]:
    """`num_ranks`: that of the first of so many ranks with trees."""
    shard = Shard(0, num_ranks)
    platform, weights = prepared(config, is_tree=is_tree, shard=shard, model=model)
    loaded = LoadedModel(model, weights, kv_dtype, is_tree)
    loaded = loaded_rank(weights, kv_dtype, num_ranks) if num_ranks > 1 else loaded
    decoder = loaded.on(platform, config.max_model_len)
    pages = plan_pages(model, config.max_model_len)
    layout = KvLayout.of(local_config(model, shard), kv_dtype, pages)
    device = platform.device
    with CompileAhead(platform.device, num_cores=2) as ahead:
        ahead.note(partial(platform.products.launch_own, weights))
        blocks = KvBlocks.allocated([layout], config.num_blocks, config.block_size, device)
        given = decoder, platform, config, pages, blocks
        parts = loaded.parts(*given, NoDrafting(), swapper=None)
        ahead.note(parts.rehearse)
    return parts.executor(adapters=None)


def loaded_rank(weights: Weights, kv_dtype: torch.dtype, num_ranks: int) -> LoadedRank:
    """The first of some ranks, beside others that compute nothing either."""
    row_bytes = 2 * MODEL.hidden_size
    memory = PeerMemory(
        index=0,
        bases=torch.zeros(num_ranks, dtype=torch.int64),
        numbers=new_numbers("cpu"),
        slot_bytes=slot_bytes_of(GROUP_ROWS * row_bytes),
        flagged_len=MODEL.hidden_size,
    )
    group = PeerGroup(memory)
    stage = Stage(0, MODEL.num_layers, MODEL.num_layers)
    options = ExecutorOptions(model_folder=None, numerics="tree", tensor_parallel_size=num_ranks)
    types = dict.fromkeys(("dtype", "kv_format", "activations"), "bfloat16")
    request = BuildRequest(options=options, model=MODEL, **types, rounds_tokens=False, is_tree=True)
    shard = Shard(0, num_ranks)
    rank = Rank(
        shard=shard,
        stage_index=0,
        stage=stage,
        group=group,
        links=StageLinks(),
        slots=-1,
        exchange=-1,
        adapters=-1,
        warn=print,
    )
    return LoadedRank(
        rank.local_config(MODEL), weights, kv_dtype, True, request, rank, group, Alone(), None
    )


def nothing_gained(
    own: DeviceGains, sampled: Int32Array
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """A device that computes nothing finds no drafts either."""
    found: Int32Array = np.zeros((len(own.num_positions), 1), np.int32)
    return found, np.ones(len(found), np.int32), np.zeros(len(found), np.int32)


def sampling(rng: np.random.Generator) -> SamplingParams:
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=int(rng.integers(1, 30)))
    return [
        plain,
        plain,
        replace(plain, top_k=5, top_p=0.9),
        replace(plain, min_p=0.1),
        replace(plain, repetition_penalty=1.2, num_logprobs=int(rng.integers(0, 20))),
        replace(
            plain, num_logprobs=0, num_prompt_logprobs=int(rng.integers(0, 5)), logit_bias={1: 2.0}
        ),
    ][rng.integers(6)]


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "kv_dtype", "drafts", "library_differs", "is_tree"),
    [
        pytest.param(8192, 96, torch.bfloat16, True, False, False, marks=pytest.mark.long),
        (2048, 96, torch.float8_e4m3fn, True, False, False),
        pytest.param(8192, 3, torch.bfloat16, False, False, False, marks=pytest.mark.long),
        pytest.param(8192, 96, torch.bfloat16, True, True, False, marks=pytest.mark.long),
        pytest.param(8192, 3, torch.bfloat16, True, True, False, marks=pytest.mark.long),
        pytest.param(2048, 96, torch.bfloat16, True, True, True, marks=pytest.mark.long),
    ],
)
def test_nothing_is_compiled_that_was_not_compiled_ahead(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    max_num_seqs: int,
    kv_dtype: torch.dtype,
    drafts: bool,
    library_differs: bool,
    is_tree: bool,
) -> None:
    assert gemm.choose(1, 1024, 1024) is not None
    launches.library_differs = library_differs
    config = replace(CONFIG, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    config = config if drafts else replace(config, max_draft_tokens=0)
    device = executor(config, kv_dtype, is_tree=is_tree)
    ahead = set(launches.seen)
    assert len(ahead) > 20
    assert ("_tree_gemm" in {name for _, name, *_ in ahead}) == is_tree
    assert device.can_draft == drafts
    monkeypatch.setattr(DeviceGains, "read", nothing_gained)
    serve_at_random(device, config)
    new = launches.seen - ahead
    assert not new, "\n".join(sorted(str(x)[:400] for x in new))


@pytest.mark.long
def test_page_groups_of_a_mixed_model_compile_no_kernel_for_themselves(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer's tables and slots are aligned alike, in captures and steps of any size."""
    is_windowed = (True, False, True)
    model = replace(MODEL, num_layers=3, sliding_window=512, is_windowed=is_windowed)
    config = replace(CONFIG, page_windows=(0, 512, 512), num_blocks=2400)
    device = executor(config, torch.bfloat16, model=model)
    ahead = set(launches.seen)
    monkeypatch.setattr(DeviceGains, "read", nothing_gained)
    serve_at_random(device, config)
    new = launches.seen - ahead
    assert not new, "\n".join(sorted(str(x)[:400] for x in new))


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_layers_of_several_shapes_are_compiled_ahead(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    """Heads of 256 and of 512, of one key head and of four, and layers without keys of their
    own."""
    is_windowed = (True, True, True, False, True, False)
    mixed = MixedLayers(
        global_head_dim=512,
        global_kv_heads=1,
        reuses_keys=True,
        num_sharing=2,
        sharing_width=3072,
        input_size=256,
        num_inputs=MODEL.vocab_size,
    )
    model = replace(
        MODEL,
        architecture="Gemma4ForCausalLM",
        num_layers=6,
        head_dim=256,
        activation="gelu_tanh",
        qk_norm=True,
        value_norm=True,
        attention_scale=1.0,
        sliding_window=512,
        is_windowed=is_windowed,
        mixed=mixed,
    )
    pages = plan_pages(model, CONFIG.max_model_len)
    config = replace(
        CONFIG, page_windows=pages.windows, num_blocks=4000, max_num_seqs=24, max_draft_tokens=3
    )
    device = executor(config, kv_dtype, model=model)
    ahead = set(launches.seen)
    monkeypatch.setattr(DeviceGains, "read", nothing_gained)
    serve_at_random(device, config)
    new = launches.seen - ahead
    assert not new, "\n".join(sorted(str(x)[:400] for x in new))
    tiles = launches.arguments(
        prefill_attention._prefill_tiles, "HEAD_DIM", "WINDOW", "ROWS", "TOKENS", "PARTS"
    )
    assert tiles == {(256, 512, 128, 32, 1), (512, 0, 64, 4, 8)}
    heads = launches.arguments(
        store_kernel._qk_norm_rope_store_kv, "NUM_Q_HEADS", "NUM_KV_HEADS", "HALF"
    )
    assert heads == {(16, 4, 128), (16, 0, 128), (16, 1, 256), (16, 0, 256)}


def serve_at_random(device: StepExecutor[Any, Any], config: EngineConfig) -> None:
    """Steps of all kinds and sizes, with drafts where the executor has any."""
    while device.prepare():
        pass
    speculator = (
        AheadSpeculator(config.max_draft_tokens, seed=1).beside(config)
        if device.can_draft
        else None
    )
    rng = np.random.default_rng(0)
    engine = Engine(config, device, speculator=speculator)
    keys = count()

    def add(prompt_len: int, common: int = 0) -> None:
        prompt_ids = [7] * common + rng.integers(1, 512, prompt_len).tolist()
        engine.add(
            NewRequest(key=next(keys), prompt_ids=prompt_ids, output_ids=[], sampling=sampling(rng))
        )

    for _ in range(12):
        common = int(rng.choice([0, 700]))
        longest = int(rng.choice([4, 40, 400, 1500]))
        for _ in range(int(rng.choice([1, 2, 5, 20, 110]))):
            add(int(rng.integers(1, longest)), common)
        while engine.has_work() and rng.random() < 0.99:
            engine.step()
    while engine.has_work():
        engine.step()
    # Steps of no usual size, with few rows and with many.
    for prompt_lens in ([3000], [1200, 1300], [900] * 5, [*[5] * 20, 2500]):
        for prompt_len in prompt_lens:
            add(prompt_len)
        while engine.has_work():
            engine.step()
    words = -(-MODEL.vocab_size // 32)
    for step, num_rows in enumerate(n for n in (1, 2, 3, 17, 96) if n <= config.max_num_seqs):
        rows = np.arange(num_rows, dtype=np.int32)
        masks = np.full((1, num_rows, words), -1, np.int32)
        device.retire(
            device.draw(
                DrawPlan(step=step, rows=rows, positions=rows + 5, output_indices=rows, masks=masks)
            )
        )


@pytest.mark.parametrize(
    ("block_size", "kv_dtype", "folds"),
    [(64, torch.bfloat16, {True}), (64, torch.float8_e4m3fn, set()), (16, torch.bfloat16, set())],
    ids=["bf16", "fp8", "blocks of 16"],
)
def test_steps_that_share_nothing_fold_first_splits_of_bf16_caches(
    launches: Launches, block_size: int, kv_dtype: torch.dtype, folds: set[bool]
) -> None:
    config = replace(CONFIG, block_size=block_size, num_blocks=800 * 64 // block_size)
    device = executor(config, kv_dtype)
    names = {name for _, name, *_ in launches.seen}
    assert {"_plan_folds" in names, "_list_folds" in names} == (folds or {False})
    noted = launches.arguments(decode_attention._decode_splits, "p_folded", "DIRECT")
    assert {folded is not type(None) for folded, is_direct in noted if not is_direct} == {
        False
    } | folds
    device.close()


def test_every_number_of_rows_finds_the_kernels_that_take_the_place_of_the_library(
    launches: Launches,
) -> None:
    launches.library_differs = True
    platform, weights = prepared(CONFIG)
    platform.products.launch_own(weights)
    ahead = set(launches.seen)
    assert {"_wide_gemm", "_hopper_wide_gemm"} <= {name for _, name, *_ in ahead}
    for name in ("lm_head", "layers.0.down"):
        linear = weights.linears[name]
        product = platform.linear(linear)
        x = torch.empty(5000, linear.in_features, dtype=torch.bfloat16)
        for num_rows in (*range(300, 5000, 37), *(range(33, 300) if name == "lm_head" else ())):
            product(x[:num_rows])
    assert launches.seen == ahead


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_with_trees_launch_no_product_of_a_library_and_add_in_the_tree(
    num_ranks: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.library_differs = True
    config = replace(CONFIG, max_draft_tokens=0)
    device = executor(config, torch.bfloat16, is_tree=True, num_ranks=num_ranks)
    while device.prepare():
        pass
    engine = Engine(config, device)
    rng = np.random.default_rng(0)
    for key, prompt_len in enumerate([3, 40, 700, *[5] * 30, 1900]):
        prompt_ids = rng.integers(1, 512, prompt_len).tolist()
        engine.add(
            NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling(rng))
        )
    while engine.has_work():
        engine.step()
    names = {name for _, name, *_ in launches.seen}
    assert {"_tree_gemm", "_peer_sum", "_peer_best", "_peer_join"} <= names
    sums = launches.arguments(peer_sum._peer_sum, "p_x", "TREE", "HAS_NORM")
    # Rows of the embedding, all but one of which are zeros, are added as they come.
    assert {(dtype, is_tree, has_norm) for (dtype, _), is_tree, has_norm in sums} == {
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
    }
    products = launches.arguments(tree_gemm._tree_gemm, "p_out", "NUM_LEAVES")
    assert {(dtype, num_leaves) for (dtype, _), num_leaves in products} == {
        (torch.float32, NUM_LEAVES // num_ranks)
    }
    monkeypatch.setattr(
        cuda_platform.CudaPlatform, "of", classmethod(lambda cls, model, config: cls)
    )
    rank = loaded_rank(Weights(linears={}, tensors={}), torch.bfloat16, num_ranks)
    assert rank.platform(config) is TreePlatform
