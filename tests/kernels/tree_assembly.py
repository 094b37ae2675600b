"""Prints the PTX of kernels whose bits must not depend on the number of ranks, as `hopper_assembly`
does."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from triton.compiler import ASTSource

from headwater.kernels.attention import (
    hopper_decode_attention,
    hopper_decode_splits,
    qk_norm_rope_store_kv,
)
from headwater.kernels.attention.online_softmax import HALF, TILE
from headwater.kernels.gemm import tree_gemm
from headwater.kernels.gemm.tree_gemm import MANY_ROWS, TILES, TreeTiles
from tests.kernels.hopper_assembly import any_gpu, built, with_rings

HEADS = (1, 2, 8)
"""Key heads of a rank."""
HEAD_DIM = 128


def product(tiles: TreeTiles) -> dict[str, Any]:
    """A product of eight leaves of many steps, with its tiles."""
    kernel = tree_gemm._tree_gemm
    constants = {
        "NUM_LEAVES": 8,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.most_block_k,
    }
    constants |= {"EVEN_K": True, "DEPENDENT": True}
    types = {
        name: "*bf16" if name.startswith("p_") else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    unknown = {each.name for each in kernel.params if each.do_not_specialize}
    multiples = [name for name, type in types.items() if type == "i32" and name not in unknown]
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    done = built(kernel, types, constants, ASTSource, multiples, **options)
    return {"ptx": done.asm["ptx"], "tiles": asdict(tiles)}


def rotation(num_kv_heads: int) -> str:
    """Norm and rotation of heads, two query heads for each key head."""
    kernel = qk_norm_rope_store_kv._qk_norm_rope_store_kv
    constants = {
        "NUM_Q_HEADS": 2 * num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "PAGE": 64,
        "HALF": HEAD_DIM // 2,
    }
    constants |= {
        "HEADS": qk_norm_rope_store_kv.HEADS,
        "HAS_BIAS": False,
        "HAS_NORM": True,
        "FP8": False,
    }
    constants |= {"ON_GPU": True, "DEPENDENT": True, "EARLY": True}
    types = {
        name: "*bf16" if name.startswith("p_") else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    types |= {"p_position": "*i32", "p_slot": "*i32", "p_cos_sin": "*fp32", "eps": "fp32"}
    strides = [name for name in types if name.startswith("stride_")]
    return str(built(kernel, types, constants, ASTSource, strides, num_warps=1).asm["ptx"])


def of_heads(num_kv_heads: int) -> dict[str, str]:
    """What computes heads, by name."""
    splits = hopper_decode_splits
    rows = hopper_decode_attention
    number = {"NUM_KV_HEADS": num_kv_heads}
    ring = {
        "TILE": TILE,
        "PART": splits.PART,
        "STAGES": splits.NUM_STAGES,
        "p_folded": None,
    } | number
    direct = {"HALF": HALF, "MAX_SPLITS": 16, "STAGES": rows.NUM_STAGES} | number
    return {
        "any GPU": any_gpu(num_kv_heads, HEAD_DIM),
        "splits": with_rings(splits._decode_items, splits.PART, ring, HEAD_DIM),
        "rows": with_rings(rows._decode_rows, HALF, direct, HEAD_DIM),
        "rotation": rotation(num_kv_heads),
    }


def main() -> None:
    products = [product(tiles) for tiles in (*TILES.values(), MANY_ROWS)]
    print(json.dumps({"products": products, "heads": [of_heads(number) for number in HEADS]}))


if __name__ == "__main__":
    main()
