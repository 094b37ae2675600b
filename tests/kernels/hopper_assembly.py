"""Prints the PTX of decode attention for Hopper as JSON; compiled here, so that no GPU is needed.

A program of its own: in a process of tests kernels are interpreted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from headwater.kernels import hopper_decode_attention, hopper_decode_splits
from headwater.kernels.online_softmax import HALF, SPLIT, TILE

INTS = ("p_table", "p_table_row", "p_seq_len", "p_count", "p_item", "p_tail", "p_first_partial", "p_arrived")
SCALARS = {"qk_scale": "fp32", "stride_table": "i32", "num_rows": "i32"}
SHAPE = {"NUM_KV_HEADS": 3, "GROUP": 3, "PAGE": 64, "SPLIT": SPLIT, "DEPENDENT": True}


def compiled(kernel: Any, keys_per_copy: int, constants: Mapping[str, int], head_dim: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([keys_per_copy, head_dim], gl.bfloat16)
    ring = f"tensordesc<bf16[{keys_per_copy}, {head_dim}],{layout!r}>"
    types = dict.fromkeys(INTS, "*i32") | dict.fromkeys(("p_q", "p_out"), "*bf16") | SCALARS
    types |= dict.fromkeys(("p_partial_acc", "p_partial_ml"), "*fp32") | {"k": ring, "v": ring}
    values = SHAPE | {"HEAD_DIM": head_dim} | constants
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in values.items()},
        attrs={
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types.get(name, "")[:1] == "*"
        },
    )
    options = {"num_warps": 4, "launch_pdl": True}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


def main() -> None:
    splits, rows = hopper_decode_splits, hopper_decode_attention
    ring = {"TILE": TILE, "PART": splits.PART, "STAGES": splits.NUM_STAGES}
    direct = {"HALF": HALF, "MAX_SPLITS": 16, "STAGES": rows.NUM_STAGES}
    programs = {
        f"{name}, heads of {head_dim}": compiled(kernel, num_keys, constants, head_dim)
        for head_dim in (64, 128)
        for name, kernel, num_keys, constants in (
            ("splits", splits._decode_items, splits.PART, ring),
            ("rows", rows._decode_rows, HALF, direct),
        )
    }
    print(json.dumps(programs))


if __name__ == "__main__":
    main()
