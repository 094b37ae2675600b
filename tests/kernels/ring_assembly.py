"""Prints the PTX and the shared memory of kernels that fill rings or whole tiles with weights
before their rows are there, as `hopper_assembly` does."""

from __future__ import annotations

import json
from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from headwater.kernels.experts import hopper_token_experts as token
from headwater.kernels.gemm import hopper_ring_gemm as ring
from headwater.kernels.gemm.gemm import RING_TILES, SHORT_RING_TILES
from headwater.kernels.gemm.hopper_few_rows_gemm import row_size
from headwater.kernels.gemm.hopper_ring_gemm import RingTiles
from tests.kernels.hopper_assembly import built, described

BLOCK_K = 64
TYPES = {"p_experts": "*i32", "p_weights": "*fp32", "p_shares": "*fp32", "n": "i32"}
TYPES |= dict.fromkeys(("p_x", "p_gate", "p_out"), "*bf16")


def program(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    done = built(kernel, types, constants | {"DEPENDENT": True}, GluonASTSource)
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared}


def of_ring(tiles: RingTiles, num_rows: int, k: int, *, has_second: bool) -> dict[str, Any]:
    size = row_size(num_rows)
    blocks = {
        "x": size if num_rows > 1 else 0,
        "first": tiles.first_n,
        "rest": tiles.rest_n,
        "second": tiles.first_n if has_second else 0,
    }
    types = {"m": "i32", "second_n": "i32"} | {name: TYPES[name] for name in ("p_x", "p_out", "n")}
    types |= {name: described(rows, BLOCK_K) for name, rows in blocks.items() if rows}
    constants: dict[str, Any] = {name: None for name, rows in blocks.items() if not rows}
    if has_second:
        types["p_second_out"] = "*bf16"
    else:
        constants["p_second_out"] = None
    constants |= {"K": k, "AT_ONCE": tiles.at_once, "NUM_ROWS": size}
    constants["NUM_GROUPS"] = tiles.num_groups(size, k)
    return program(ring._ring_gemm, types, constants) | {"most": tiles.most_bytes}


def of_gates(names: tuple[str, ...]) -> dict[str, Any]:
    types = {name: TYPES[name] for name in ("p_x", "p_experts", "p_out", "n", *names)}
    types |= dict.fromkeys(("weight", "shared"), described(token.GATES, BLOCK_K))
    groups = token.RING_BYTES // (4 * token.GATES * BLOCK_K * token.AT_ONCE)
    constants = {"K": 2048, "NUM_PAIRS": 8, "AT_ONCE": token.AT_ONCE, "NUM_GROUPS": groups}
    without: dict[str, Any] = {} if names else {"p_gate": None, "p_shares": None}
    return program(token._gate_token, types, constants | without) | {"most": 75 << 10}


def of_sums(names: tuple[str, ...]) -> dict[str, Any]:
    outputs: int = token.OUTPUTS.value
    types = {name: TYPES[name] for name in ("p_experts", "p_weights", "p_out", "n", *names)}
    types |= dict.fromkeys(("weight", "shared"), described(outputs, BLOCK_K))
    types["gated_rows"] = described(token.ROWS.value, BLOCK_K)
    constants = {"K": 512, "NUM_PAIRS": 8, "COLUMNS": 8 * outputs}
    without: dict[str, Any] = {} if names else {"p_shares": None}
    return program(token._sum_token, types, constants | without) | {"most": token.SHARED_BYTES}


def main() -> None:
    programs = {
        f"ring, {num_rows} rows": of_ring(RING_TILES, num_rows, 2048, has_second=num_rows == 1)
        for num_rows in (1, 16)
    }
    programs["short ring"] = of_ring(SHORT_RING_TILES, 1, 4096, has_second=False)
    programs |= {
        "gates": of_gates(("p_gate", "p_shares")),
        "gates beside an expert without a share": of_gates(()),
        "sums": of_sums(("p_shares",)),
        "sums with an expert without a share": of_sums(()),
    }
    print(json.dumps(programs))


if __name__ == "__main__":
    main()
