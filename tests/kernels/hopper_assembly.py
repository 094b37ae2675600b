"""Prints the PTX of kernels as a Hopper GPU gets it, as JSON; compiled here, so that no GPU is
needed.

A program of its own: in a process of tests kernels are interpreted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from headwater.kernels.adapters import hopper_shrink
from headwater.kernels.adapters.adapter_tiles import FEW_TILE
from headwater.kernels.adapters.slab import MAX_RANK, PIECE, RANK_UNIT
from headwater.kernels.attention import (
    decode_attention,
    hopper_decode_attention,
    hopper_decode_splits,
)
from headwater.kernels.attention.online_softmax import HALF, SPLIT, TILE
from headwater.kernels.blocks import copy_blocks
from headwater.kernels.experts import (
    expert_product,
    expert_rows,
    hopper_grouped_gemm,
    hopper_rounded_gemm,
    rounded_product,
)
from headwater.kernels.experts.expert_rows import RowTiles
from headwater.kernels.gemm import (
    hopper_block_gemm,
    hopper_few_rows_gemm,
    hopper_packed_gemm,
    hopper_w8a8_gemm,
    hopper_w8a8_rows,
    hopper_wide_gemm,
    w8a8,
)
from headwater.kernels.gemm.block_unpacking import constants
from headwater.kernels.gemm.hopper_few_rows_gemm import FewRowTiles
from headwater.kernels.gemm.hopper_w8a8_rows import RowsTiles
from headwater.kernels.gemm.wide_tiles import TEAM_TILES, TeamTiles
from headwater.kernels.norm import rms_norm, silu_mul
from headwater.kernels.quant import token_rounding
from headwater.kernels.quant.block_formats import Q4_1, Q4_K, Q6_K, Q8_0, BlockFormat
from headwater.kernels.quant.block_planes import plane_shapes
from headwater.kernels.rows import draft_rows
from headwater.kernels.sampling import edit_logits

INTS = (
    "p_table",
    "p_table_row",
    "p_seq_len",
    "p_count",
    "p_item",
    "p_tail",
    "p_first_partial",
    "p_arrived",
)
SCALARS = {"qk_scale": "fp32", "stride_table": "i32", "num_rows": "i32"}
TYPES = dict.fromkeys(INTS, "*i32") | dict.fromkeys(("p_q", "p_out"), "*bf16") | SCALARS
TYPES |= dict.fromkeys(("p_partial_acc", "p_partial_ml"), "*fp32")
SHAPE = {"GROUP": 3, "PAGE": 64, "SPLIT": SPLIT, "DEPENDENT": True, "p_sinks": None}
BLOCK_ROWS = 36 * 2 * 3 * 64
"""Rows of a block of 36 layers."""
TOKEN_SCALES = dict.fromkeys(("p_x_scales", "p_weight_scales"), "*fp32")
SCALES = {"fp16": gl.float16, "bf16": gl.bfloat16, "u8": gl.uint8}
HEADS = ((1, 64), (1, 128), (2, 128))
"""Key heads of attention for any GPU, and their size."""


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], source: Any, **options: Any
) -> str:
    """PTX. Arguments without a type are constants; pointers are aligned."""
    return str(built(kernel, types, constants, source, **options).asm["ptx"])


def built(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    source: Any,
    multiples: Collection[str] = (),
    **options: Any,
) -> Any:
    """`multiples`: integers that are divisible by 16, as pointers are."""
    names = kernel.arg_names
    made = source(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types.get(name, "")[:1] == "*" or name in multiples
        },
    )
    options = {"num_warps": 4, "launch_pdl": True} | options
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)


def described(num_rows: int, num_columns: int) -> str:
    return descriptor("bf16", gl.bfloat16, num_rows, num_columns)


def e4m3(num_rows: int, num_columns: int) -> str:
    return descriptor("fp8e4nv", gl.float8e4nv, num_rows, num_columns)


def descriptor(name: str, dtype: Any, *block: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return f"tensordesc<{name}{list(block)},{layout!r}>"


def with_rings(kernel: Any, keys_per_copy: int, constants: Mapping[str, Any], head_dim: int) -> str:
    """A constant that is a type is the type of that argument."""
    ring = described(keys_per_copy, head_dim)
    types = (
        TYPES
        | {"k": ring, "v": ring}
        | {name: each for name, each in constants.items() if isinstance(each, str)}
    )
    values = SHAPE | {"BLOCK_ROWS": BLOCK_ROWS, "NUM_KV_HEADS": 3, "HEAD_DIM": head_dim}
    values |= constants
    return compiled(
        kernel, types, {name: values[name] for name in values.keys() - types.keys()}, GluonASTSource
    )


def any_gpu(num_kv_heads: int, head_dim: int, *, folds: bool = False) -> str:
    unused = dict.fromkeys(("p_k_scale", "p_v_scale"), "*i32")
    caches = dict.fromkeys(("p_k", "p_v"), "*bf16") | dict.fromkeys(
        ("stride_block", "stride_head"), "i32"
    )
    values = SHAPE | {"NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "stride_slot": head_dim}
    values |= {
        "BLOCK_ROWS": BLOCK_ROWS,
        "TILE": TILE,
        "HALF": HALF,
        "FP8": False,
        "MAX_SPLITS": 8,
        "WINDOW": 0,
        "SOFTCAP": 0.0,
        "DIRECT": False,
        "ON_GPU": True,
    }
    types = TYPES | unused | caches | ({"p_folded": "*i32"} if folds else {})
    values |= {} if folds else {"p_folded": None}
    registers = decode_attention.MAX_REGISTERS
    return compiled(
        decode_attention._decode_splits, types, values, ASTSource, num_stages=2, maxnreg=registers
    )


def many_rows(tiles: TeamTiles) -> dict[str, Any]:
    """PTX and bytes of shared memory of a product by teams."""
    values = hopper_wide_gemm.constants(tiles)
    return by_teams(
        hopper_wide_gemm._hopper_wide_gemm, tiles, partial(described, num_columns=64), {}, values
    )


def many_rounded_rows(tiles: TeamTiles, *, in_blocks: bool) -> dict[str, Any]:
    """As `many_rows`, of tokens in e4m3."""
    tiled = partial(e4m3, num_columns=hopper_w8a8_gemm.BLOCK_K)
    values = hopper_w8a8_gemm.constants(tiles) | {"IN_BLOCKS": in_blocks}
    return by_teams(hopper_w8a8_gemm._w8a8_gemm, tiles, tiled, TOKEN_SCALES, values)


def by_teams(
    kernel: Any,
    tiles: TeamTiles,
    tiled: Callable[[int], str],
    more: Mapping[str, str],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    rows = tiles.team_rows
    rest_n = tiles.block_n - tiles.first_n
    types = dict.fromkeys(("m", "n", "k"), "i32") | more
    types |= {"x": tiled(rows), "weight": tiled(tiles.first_n), "out": described(rows, tiles.chunk)}
    types |= {"weight_rest": tiled(rest_n)} if rest_n else {}
    types |= {"out_rest": described(rows, rest_n)} if 0 < rest_n < tiles.chunk else {}
    absent = dict.fromkeys({"weight_rest", "out_rest"} - types.keys())
    done = built(kernel, types, absent | values, GluonASTSource)
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared, "bound": tiles.shared_bytes()}


def rounded() -> dict[str, str]:
    """Kernels that round tokens to e4m3, by name."""
    most = {"MOST": 448.0, "SHARED": 0, "DEPENDENT": True, "EARLY": True}
    sizes = dict.fromkeys(("stride", "stride_in", "width", "k", "num_tokens", "hidden"), "i32") | {
        "eps": "fp32"
    }
    sizes |= dict.fromkeys(("stride_x", "stride_residual", "stride_out"), "i32") | {
        "p_values": "*fp8e4nv"
    }
    sizes |= dict.fromkeys(("p_x", "p_residual", "p_weight", "p_gate_up"), "*bf16") | {
        "p_scales": "*fp32"
    }
    norm = most | {"BLOCK": 1024, "HAS_RESIDUAL": True}
    return {
        "tokens": compiled(token_rounding._round_tokens, sizes, most | {"BLOCK": 1024}, ASTSource),
        "norm": compiled(rms_norm._rms_norm, sizes | {"p_out": "*fp8e4nv"}, norm, ASTSource),
        "gate": compiled(
            silu_mul._activate_mul_round, sizes, most | {"BLOCK": 1024, "GELU": True}, ASTSource
        ),
        "tokens by groups": compiled(
            token_rounding._round_tokens, sizes, most | {"BLOCK": 1024, "SHARED": 128}, ASTSource
        ),
    }


def few_rounded_rows(tiles: RowsTiles, *, in_blocks: bool, of_experts: bool = False) -> str:
    """A product of few tokens in e4m3."""
    sizes = ("max_tiles", "m", "n", "k")
    types = dict.fromkeys(sizes, "i32") | TOKEN_SCALES | {"p_out": "*bf16"}
    types |= {
        "x": e4m3(tiles.block_m, tiles.block_k),
        "weight": e4m3(hopper_w8a8_rows.BLOCK_N, tiles.block_k),
    }
    values = {
        "IN_BLOCKS": in_blocks,
        "SUM_K": hopper_w8a8_rows.SUM_K,
        "STAGES": tiles.num_stages,
        "SHARED_ROW": False,
        "KNOWN": False,
        "DEPENDENT": True,
    }
    lists = ("p_tiles", "p_num_tiles")
    types |= dict.fromkeys(lists, "*i32") if of_experts else {}
    values |= {} if of_experts else dict.fromkeys(lists)
    registers = hopper_w8a8_rows.registers_of(tiles, in_blocks=in_blocks, of_experts=of_experts)
    return compiled(hopper_w8a8_rows._w8a8_rows, types, values, GluonASTSource, maxnreg=registers)


def few_rows(num_rows: int, *, gates: bool, k: int = 1024) -> dict[str, Any]:
    """PTX and bytes of shared memory of a product of k inputs."""
    tiles = FewRowTiles(32)
    block_k = hopper_few_rows_gemm.BLOCK_K.value
    size = max(num_rows, hopper_few_rows_gemm.ROW_SIZE.value)
    types = {
        "weight": described(tiles.block_n, block_k),
        "p_x": "*bf16",
        "p_out": "*bf16",
        "m": "i32",
        "n": "i32",
    }
    values: dict[str, Any] = {"K": k, "NUM_ROWS": size, "GATES": gates, "DEPENDENT": True}
    values["AT_ONCE"] = hopper_few_rows_gemm.tiles_at_once(k)
    if num_rows > 1:
        types |= {"x": described(size, block_k)}
    else:
        values |= {"x": None}
    done = built(hopper_few_rows_gemm._few_rows_gemm, types, values, GluonASTSource)
    bound = tiles.shared_bytes(size, k, gates=gates)
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared, "bound": bound}


def order_of_sums() -> dict[str, str]:
    """The inputs that a thread sums by itself in a norm of 4,096, by what the norm is stored as:
    the layout of the first reduction."""
    strides = ("stride_x", "stride_residual", "stride_out", "hidden")
    types = dict.fromkeys(("num_tokens", *strides), "i32") | {"eps": "fp32"}
    types |= dict.fromkeys(("p_x", "p_residual", "p_weight"), "*bf16")
    constants = {"BLOCK": 4096, "HAS_RESIDUAL": True, "EARLY": False, "DEPENDENT": True}
    found = {}
    kinds = (("bf16", 0.0, 0), ("i8", 127.0, 0), ("fp8e4nv", 448.0, 0), ("fp8e4nv", 448.0, 128))
    for out, most, shared in kinds:
        scales = {"p_scales": "*fp32"} if most else {}
        values = constants | {"MOST": most, "SHARED": shared} | ({} if most else {"p_scales": None})
        given = types | scales | {"p_out": f"*{out}"}
        code = built(rms_norm._rms_norm, given, values, ASTSource, strides, num_warps=8).asm[
            "ttgir"
        ]
        summed = re.search(r"tt\.reduce.*?: \(tensor<4096xf32, (#\w+)>\)", code, re.DOTALL)
        assert summed is not None
        layout = re.search(rf"^{summed[1]} = (.*)$", code, re.MULTILINE)
        assert layout is not None
        found[f"{out}, {shared or 'all'} inputs a scale"] = layout[1]
    return found


def packed(
    bits: int,
    num_rows: int,
    *,
    has_zeros: bool,
    num_outputs: int = hopper_packed_gemm.BLOCK_N,
    scale: str = "fp16",
    of_experts: bool = False,
) -> str:
    """A product of packed weights in groups of 32 inputs, two tiles in a stage."""
    block_k = 2 * 512 // bits
    of_a_group = max(num_outputs, hopper_packed_gemm.BLOCK_N)
    if scale == "u8":
        of_a_group = 2 * hopper_packed_gemm.BLOCK_N
    words = gl.NVMMASharedLayout(64, 32, 2)
    sizes = ("max_tiles", "m", "n", "num_weights", "k")
    types = dict.fromkeys(sizes, "i32") | {"p_out": "*bf16"}
    types |= {
        "x": described(num_rows, block_k),
        "scales": descriptor(scale, SCALES[scale], of_a_group),
    }
    types |= {"words": f"tensordesc<i32[{num_outputs}, 32],{words!r}>"}
    types |= (
        {"zeros": descriptor("u8", gl.uint8, 2 * hopper_packed_gemm.BLOCK_N)} if has_zeros else {}
    )
    values = {"BITS": bits, "GROUP": 32, "GROUP_SIZE": 32, "STAGES": 3, "DEPENDENT": True}
    values |= {"SHARED_ROW": False, "KNOWN": False}
    values |= {} if has_zeros else {"zeros": None}
    lists = ("p_tiles", "p_num_tiles")
    types |= dict.fromkeys(lists, "*i32") if of_experts else {}
    values |= {} if of_experts else dict.fromkeys(lists)
    options = {} if num_outputs > hopper_packed_gemm.BLOCK_N else {"maxnreg": 128}
    return compiled(
        hopper_packed_gemm._hopper_packed_gemm, types, values, GluonASTSource, **options
    )


def in_blocks(format: BlockFormat, num_rows: int) -> str:
    """A product of weights in a block format, two tiles in a stage."""
    block_k = 2 * hopper_block_gemm.tile_inputs(format.bits)
    shapes = plane_shapes(format, 64, 512)
    words = gl.NVMMASharedLayout(64, 32, 2)
    types = dict.fromkeys(("m", "n", "k", "stride_out"), "i32") | {"p_out": "*bf16"}
    types |= {"x": described(num_rows, block_k), "words": f"tensordesc<i32[64, 32],{words!r}>"}
    types |= {"scales": descriptor("fp16", gl.float16, hopper_block_gemm.scale_chunk(format))}
    if "high" in shapes:
        types |= {"high": descriptor("i32", gl.int32, hopper_block_gemm.CHUNK)}
    if "factors" in shapes:
        name, dtype = ("u8", gl.uint8) if format.has_min else ("i8", gl.int8)
        types |= {"factors": descriptor(name, dtype, hopper_block_gemm.CHUNK)}
    values = constants(format) | {"STAGES": 3, "DEPENDENT": True}
    values |= {name: None for name in ("high", "factors") if name not in types}
    return compiled(
        hopper_block_gemm._hopper_block_gemm, types, values, GluonASTSource, maxnreg=128
    )


def edits() -> dict[str, str]:
    """The kernels of `edit_logits` by name, as it launches them."""
    types = dict.fromkeys(("p_row", "p_position", "p_table", "p_mark", "p_output"), "*i32")
    types |= {"p_address": "*i64", "p_logit": "*bf16", "p_out": "*fp32"}
    types |= dict.fromkeys(("stride_table", "stride_address", "stride_logit", "vocab_size"), "i32")
    kernels = {
        "clear": (edit_logits._clear_marks, {"BLOCK": edit_logits.BLOCK}),
        "mark": (
            edit_logits._mark,
            {"BLOCK": edit_logits.LIST_BLOCK, "COUNTERS": edit_logits.COUNTERS},
        ),
        "edit": (edit_logits._edit, {"BLOCK": edit_logits.BLOCK}),
        "forbid": (edit_logits._forbid, {"BLOCK": edit_logits.LIST_BLOCK}),
    }
    options = {"edit": edit_logits.EDIT_OPTIONS}
    return {
        name: compiled(kernel, types, constants, ASTSource, **options.get(name, {}))
        for name, (kernel, constants) in kernels.items()
    }


def drafts() -> dict[str, str]:
    """The kernels of `draft_rows` by name, as it launches them."""
    sizes = {"PLACE_BITS": draft_rows._PLACE_BITS, "SPLITS": draft_rows._SPLITS}
    matches = sizes | {
        "MIN": draft_rows.MIN_MATCH,
        "MAX": draft_rows.MAX_MATCH,
        "BLOCK": draft_rows._BLOCK,
    }
    width = {"WIDTH": draft_rows._WIDTH}
    kernels = {
        "match": (draft_rows._find_matches, matches),
        "write": (draft_rows._write_drafts, sizes | width | {"HAS_ENDS": False}),
        "write with ends": (draft_rows._write_drafts, sizes | width | {"HAS_ENDS": True}),
        "store": (draft_rows._store_drafted, width),
    }
    return {
        name: compiled(
            kernel,
            {
                each: "*i32" if each.startswith("p_") else "i32"
                for each in kernel.arg_names
                if each not in constants
            },
            constants,
            ASTSource,
        )
        for name, (kernel, constants) in kernels.items()
    }


def adapters() -> str:
    """The first factor of a layer with three projections of 4,096 inputs."""
    kernel = hopper_shrink._shrink_pieces
    values = {"NUM_PARTS": 3, "NUM_PIECES": 4, "PIECE": PIECE, "UNIT": RANK_UNIT}
    values |= {"MAX_RANK": MAX_RANK, "TILE": FEW_TILE, "BLOCK_R": hopper_shrink.RANKS}
    values |= {"BLOCK_K": hopper_shrink.BLOCK_K}
    multiples = ("stride_x", "stride_rank", "num_inputs")
    types = dict.fromkeys(("p_rows", "p_slots", "p_ranks", "p_count"), "*i32")
    types |= dict.fromkeys(multiples, "i32") | {"p_shrunk": "*fp32"}
    types |= dict.fromkeys(("p_x", "p_numbers"), "*bf16")
    return str(built(kernel, types, values, GluonASTSource, multiples).asm["ptx"])


def pull() -> str:
    """The kernel of `pull_blocks` as it is launched for blocks of a multiple of 16 words."""
    kernel = copy_blocks._copy
    constants = {"BLOCK": copy_blocks.BLOCK}
    pointers = [name for name in kernel.arg_names if name.startswith("p_")]
    integers = [name for name in kernel.arg_names if name not in (*pointers, *constants, "address")]
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(integers, "i32") | {"address": "i64"}
    unknown = {each.name for each in kernel.params if each.do_not_specialize}
    multiples = [name for name in integers if name not in unknown]
    return str(built(kernel, types, constants, ASTSource, multiples, num_warps=8).asm["ptx"])


def of_many_experts(*, gates: bool, gathers: bool) -> dict[str, Any]:
    """PTX and bytes of shared memory of `grouped_gemm`."""
    kernel = hopper_grouped_gemm._grouped_gemm
    tiles = hopper_grouped_gemm.TILES
    columns = tiles.block_n // (2 if gates else 1)
    block_k = hopper_grouped_gemm.BLOCK_K
    types = dict.fromkeys(("p_tiles", "p_num_tiles"), "*i32")
    types |= dict.fromkeys(("max_tiles", "stride_x", "n", "k"), "i32")
    types |= {
        "x": described(hopper_grouped_gemm.TEAM_ROWS, block_k),
        "weight": described(columns, block_k),
        "out": described(hopper_grouped_gemm.TEAM_ROWS, tiles.chunk),
    }
    types |= {"weight_up": described(columns, block_k)} if gates else {}
    types |= {"p_x": "*bf16", "p_pairs": "*i32"} if gathers else {}
    values = hopper_grouped_gemm.constants(tiles, is_gelu=False, shared_by=8 if gathers else 0)
    absent = dict.fromkeys({"weight_up", "p_x", "p_pairs"} - types.keys())
    done = built(kernel, types, absent | values, GluonASTSource, ("stride_x", "n", "k"))
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared}


def of_rounded_experts(*, in_blocks: bool) -> dict[str, Any]:
    """As `of_many_experts`, of tokens in e4m3."""
    tiles = hopper_rounded_gemm.TILES
    types = dict.fromkeys(("p_tiles", "p_num_tiles"), "*i32") | TOKEN_SCALES
    types |= dict.fromkeys(("max_tiles", "num_rows", "n", "k"), "i32")
    types |= {
        "x": e4m3(hopper_grouped_gemm.TEAM_ROWS, hopper_rounded_gemm.BLOCK_K),
        "weight": e4m3(tiles.block_n, hopper_rounded_gemm.BLOCK_K),
        "out": described(hopper_grouped_gemm.TEAM_ROWS, tiles.chunk),
    }
    values = hopper_rounded_gemm.constants(tiles) | {"IN_BLOCKS": in_blocks}
    kernel = hopper_rounded_gemm._rounded_gemm
    done = built(kernel, types, values, GluonASTSource, ("n", "k"))
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared}


def of_few_experts(tiles: RowTiles, *, gates: bool) -> dict[str, Any]:
    """As `of_many_experts`, of rows that a work list names."""
    kernel = expert_rows._expert_rows
    types = dict.fromkeys(("p_experts", "p_pairs", "p_tiles", "p_num_tiles"), "*i32")
    types |= dict.fromkeys(("num_pairs", "num_slots", "n", "k", "stride_x"), "i32")
    types |= dict.fromkeys(("p_x", "p_weight", "p_out"), "*bf16")
    types |= {"weight": f"tensordesc<bf16[{tiles.block_n}, {tiles.block_k}]>"}
    values = expert_rows.constants(tiles, gates=gates, is_gelu=False, dependent=True)
    values |= {"PAIRS": 0, "BY_PAIR": False, "ALONE": False, "SHARED_BY": 1, "EVEN_K": True}
    values |= {"LINES": 0, "LINES_BLOCK": 1}
    multiples = ("n", "k", "stride_x")
    done = built(kernel, types, values, ASTSource, multiples, num_warps=tiles.num_warps)
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared}


def rings() -> dict[str, str]:
    splits = hopper_decode_splits
    rows = hopper_decode_attention
    ring = {"TILE": TILE, "PART": splits.PART, "STAGES": splits.NUM_STAGES, "WINDOW": 0}
    direct = {"HALF": HALF, "MAX_SPLITS": 16, "STAGES": rows.NUM_STAGES, "WINDOW": 0}
    wide = ring | {"p_folded": None, "WINDOW": 4096}
    return {
        "splits in a window, heads of 256": with_rings(
            splits._decode_items, splits.PART, wide, splits.WIDE_HEAD
        )
    } | {
        f"{name}, heads of {head_dim}": with_rings(kernel, num_keys, constants, head_dim)
        for head_dim in (64, 128)
        for name, kernel, num_keys, constants in (
            ("splits", splits._decode_items, splits.PART, ring | {"p_folded": None}),
            ("folded splits", splits._decode_items, splits.PART, ring | {"p_folded": "*i32"}),
            ("rows", rows._decode_rows, HALF, direct),
            (
                "rows with sinks and a window",
                rows._decode_rows,
                HALF,
                direct | {"p_sinks": "*fp32", "WINDOW": 128},
            ),
        )
    }


def others() -> dict[str, str]:
    return {
        f"{num_kv_heads} key heads of {head_dim}{', folded' if folds else ''}": any_gpu(
            num_kv_heads, head_dim, folds=folds
        )
        for num_kv_heads, head_dim in HEADS
        for folds in (False, True)
    }


def packed_products() -> dict[str, str]:
    products = {
        f"{name}, {num_rows} rows": packed(bits, num_rows, has_zeros=has_zeros)
        for name, bits, has_zeros in (("int4", 4, True), ("int8", 8, True), ("fp8", 8, False))
        for num_rows in (8, 64)
    }
    products |= {
        f"{name}, {team}": packed(bits, num_rows, has_zeros=has_zeros, num_outputs=num_outputs)
        for name, bits, has_zeros in (("int4", 4, True), ("int8", 8, True), ("fp8", 8, False))
        for team, num_rows, num_outputs in (
            ("half a team", 8, hopper_packed_gemm.BLOCK_N // 2),
            ("two teams", 128, 2 * hopper_packed_gemm.BLOCK_N),
        )
    }
    products |= {
        f"{name} of experts, {team}": packed(
            bits, num_rows, has_zeros=False, num_outputs=num_outputs, of_experts=True
        )
        for name, bits in (("int4", 4), ("fp8", 8))
        for team, num_rows, num_outputs in (
            ("a team", 16, hopper_packed_gemm.BLOCK_N),
            ("two teams", 128, 2 * hopper_packed_gemm.BLOCK_N),
        )
    }
    products |= {
        f"int4 as mxfp4 of experts, {num_rows} rows": packed(
            4, num_rows, has_zeros=False, scale="u8", of_experts=True
        )
        for num_rows in (8, 64)
    }
    return products | {"int4, symmetric": packed(4, 8, has_zeros=False, scale="bf16")}


def teams() -> dict[str, Any]:
    many = w8a8.TEAM_TILES[0]
    plain = {str(tiles): many_rows(tiles) for tiles in TEAM_TILES if tiles.first_n < tiles.block_n}
    return plain | {
        f"{many} of e4m3{kind}": many_rounded_rows(many, in_blocks=bool(kind))
        for kind in ("", " in blocks")
    }


def rounded_rows() -> dict[str, str]:
    return {
        f"{tiles}{kind}": few_rounded_rows(tiles, in_blocks=bool(kind))
        for tiles in (hopper_w8a8_rows.TILES[8], hopper_w8a8_rows.TILES[64])
        for kind in ("", " in blocks")
    }


def few_rounded_experts() -> dict[str, str]:
    return {
        f"{tiles} of experts{kind}": few_rounded_rows(tiles, in_blocks=bool(kind), of_experts=True)
        for tiles in (rounded_product.ROWS_TILES[8], rounded_product.ROWS_TILES[64])
        for kind in ("", " in blocks")
    }


def many_rounded_experts() -> dict[str, Any]:
    return {
        f"e4m3 of experts{kind}": of_rounded_experts(in_blocks=bool(kind))
        for kind in ("", " in blocks")
    }


def rows_of_gates() -> dict[str, Any]:
    return {
        f"{num_rows} rows{' and gates' if gates else ''}": few_rows(num_rows, gates=gates)
        for num_rows in (1, 16)
        for gates in (False, True)
    } | {"1 row of 45 tiles": few_rows(1, gates=False, k=2880)}


def many_experts() -> dict[str, Any]:
    return {
        f"{'gates' if gates else 'outputs'}{' of tokens' if gathers else ''}": (
            of_many_experts(gates=gates, gathers=gathers)
        )
        for gates, gathers in ((True, False), (False, False), (True, True))
    }


def few_experts() -> dict[str, Any]:
    return {
        f"{tiles.block_m} rows of {'gates' if gates else 'outputs'}": (
            of_few_experts(tiles, gates=gates)
        )
        for pair in expert_product.ROW_TILES.values()
        for tiles, gates in zip(pair, (True, False), strict=True)
    }


def block_products() -> dict[str, str]:
    return {each.name: in_blocks(each, 8) for each in (Q4_1, Q4_K, Q6_K, Q8_0)}


GROUPS: dict[str, Callable[[], Any]] = {
    "rings": rings,
    "others": others,
    "teams": teams,
    "few rows": rows_of_gates,
    "many experts": many_experts,
    "few experts": few_experts,
    "packed": packed_products,
    "blocks": block_products,
    "edits": edits,
    "drafts": drafts,
    "rounded": rounded,
    "rounded rows": rounded_rows,
    "few rounded experts": few_rounded_experts,
    "many rounded experts": many_rounded_experts,
    "order of sums": order_of_sums,
    "pull": pull,
    "adapters": adapters,
}


def main() -> None:
    """Arguments: the groups to compile."""
    print(json.dumps({name: GROUPS[name]() for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
