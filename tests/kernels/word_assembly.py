"""Prints the PTX of kernels that exchange over host memory, as `hopper_assembly` does."""

from __future__ import annotations

import json
from typing import Any

from triton.compiler import ASTSource

from headwater.kernels.peer import peer_join, peer_sum
from headwater.kernels.peer.peer_sum import Way
from headwater.kernels.sampling import peer_best
from headwater.kernels.stage import stage_stream
from tests.kernels.hopper_assembly import compiled

TYPES = {"p_bases": "*i64", "p_piece": "*i64", "p_score": "*fp32", "eps": "fp32"}
TYPES |= dict.fromkeys(("own", "before", "behind", "message"), "i64")
TYPES |= dict.fromkeys(("p_x", "p_residual", "p_weight", "p_stream"), "*bf16")
SUM = {
    "SIZE": 3,
    "BLOCK": 1024,
    "PART": 512,
    "GROUP": 1,
    "HAS_NORM": True,
    "TREE": False,
    "DEPENDENT": True,
}
STREAM = {"BLOCK": 1024}
MESSAGE = {"BLOCK": 64}


def program(kernel: Any, constants: dict[str, Any], **types: str) -> str:
    constants = constants | {"HOST": True, "ON_GPU": True}
    plain = {
        name: "*i32" if name.startswith("p_") else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    known = plain | {name: kind for name, kind in (TYPES | types).items() if name in plain}
    return compiled(kernel, known, constants, ASTSource)


def main() -> None:
    ways = (Way.FLAGGED, Way.ONE_SHOT, Way.TWO_SHOTS)
    programs = {
        **{
            way.name: program(peer_sum._peer_sum, SUM | {"WAY": int(way)}, p_out="*bf16")
            for way in ways
        },
        "join": program(peer_join._peer_join, {"SIZE": 3, "COLUMNS": 1024}),
        "best": program(peer_best._peer_best, {"SIZE": 3, "BLOCK": 16}),
        "send stream": program(stage_stream._send_stream, STREAM),
        "receive stream": program(stage_stream._receive_stream, STREAM),
        "send tokens": program(stage_stream._send_tokens, MESSAGE),
        "receive tokens": program(stage_stream._receive_tokens, MESSAGE),
        "send ends": program(stage_stream._send_ends, MESSAGE | {"LAST": 4}),
        "receive ends": program(stage_stream._receive_ends, MESSAGE | {"LAST": 4}),
    }
    print(json.dumps(programs))


if __name__ == "__main__":
    main()
