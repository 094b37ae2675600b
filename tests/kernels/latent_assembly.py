"""Prints the bytes of shared memory that kernels for latents take on a Hopper GPU, as JSON;
compiled here, so that no GPU is needed.

A program of its own: in a process of tests kernels are interpreted."""

from __future__ import annotations

import json
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from headwater.kernels.attention.online_softmax import SPLIT
from headwater.kernels.latent import (
    choose_positions,
    gather_latents,
    head_products,
    hopper_latent_attention,
    index_scores,
    latent_attention,
    latent_plan,
    store_index_keys,
    store_latents,
)
from headwater.kernels.latent.latent_tiles import KEYS
from tests.kernels.hopper_assembly import built, described

NUM_HEADS = 20
RESULTS = dict.fromkeys(("p_total", "p_partial", "p_ml"), "*fp32") | {"p_out": "*bf16"}
SIZES = {"HEADS": NUM_HEADS, "SPLIT": SPLIT, "KEYS": KEYS, "PAGE": 64}


def shared_by(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> int:
    """Bytes of shared memory of a kernel whose other arguments are integers, and pointers to
    int32."""
    given = {
        name: "*i32" if name.startswith("p_") else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    source = options.pop("source", ASTSource)
    done = built(kernel, given | types, constants, source, launch_pdl=False, **options)
    return int(done.metadata.shared)


def attention(*, decodes: bool) -> dict[str, int]:
    """Of the kernel for any GPU and of that for Hopper."""
    rank = hopper_latent_attention.RANK
    rotary = hopper_latent_attention.ROTARY
    types = RESULTS | {"qk_scale": "fp32"}
    own = {
        "stride_slot": rank + rotary,
        "RANK": rank,
        "ROTARY": rotary,
        "BLOCK_RANK": rank,
        "BLOCK_ROTARY": rotary,
        "ROWS": latent_attention.FEW_ROWS,
    }
    of_hopper = {"BLOCK_ROWS": 47 * 64, "REGISTERS": hopper_latent_attention.REGISTERS}
    tiles = {
        "p_q": "*bf16",
        "q_wide": described(latent_plan.ROWS, hopper_latent_attention.HALF),
        "wide": described(KEYS, hopper_latent_attention.HALF),
        "narrow": described(KEYS, rotary),
    }
    constants = SIZES | {"DECODES": decodes}
    return {
        "any GPU": shared_by(
            latent_attention._attend_latents,
            types | {"p_q": "*bf16", "p_cache": "*bf16"},
            constants | own,
            num_stages=1,
        ),
        "Hopper": shared_by(
            hopper_latent_attention._attend_latents,
            types | tiles,
            constants | of_hopper,
            source=GluonASTSource,
        ),
    }


def others() -> dict[str, int]:
    pointers = dict.fromkeys(("p_q", "p_kv", "p_cache", "p_norm"), "*bf16")
    stored = {"NUM_HEADS": NUM_HEADS, "HEAD_DIM": 256, "PAGE": 64, "RANK": 512, "BLOCK_RANK": 512}
    stored |= {"HALF": 32, "BLOCK_HALF": 32, "HEADS": store_latents.HEADS, "DEPENDENT": False}
    found = {
        f"store, {'neighbours' if interleaved else 'halves'}": shared_by(
            store_latents._store_latents,
            pointers | {"p_cos_sin": "*fp32", "eps": "fp32"},
            stored | {"INTERLEAVED": interleaved},
            num_warps=1,
        )
        for interleaved in (False, True)
    }
    product = {"N": 512, "K": 192, "STRIDE_N": 1, "STRIDE_K": 512, "COPIED": 64, "BLOCK_COPIED": 64}
    product |= {"BLOCK_N": head_products.BLOCK_N, "BLOCK_K": head_products.BLOCK_K}
    for rows in (16, head_products.MANY_ROWS):
        found[f"products, {rows} rows"] = shared_by(
            head_products._multiply_heads,
            dict.fromkeys(("p_x", "p_weight", "p_out"), "*bf16"),
            product | {"ROWS": rows},
            num_stages=3,
        )
    found |= of_indexers()
    plan = {"SPLIT": SPLIT, "BLOCK_R": 256, "BLOCK_S": 64}
    return found | {"plan": shared_by(latent_plan._plan_latents, {}, plan)}


def of_indexers() -> dict[str, int]:
    slots = {"stride_slot": 704, "PAGE": 64}
    stored = {"NUM_HEADS": 64, "DIM": 128, "BLOCK_DIM": 128, "PAGE": 64, "HALF": 32}
    stored |= {"BLOCK_HALF": 32, "HEADS": store_index_keys.HEADS, "INTERLEAVED": False}
    scored = slots | {"HEADS": 64, "BLOCK_HEADS": 64, "DIM": 128, "BLOCK_DIM": 128}
    parts = {"PARTS": choose_positions.MOST_PARTS, "SCAN": choose_positions.SCAN}
    copied = slots | {"WIDTH": 576, "BLOCK_WIDTH": 1024, "KEYS": KEYS}
    floats = dict.fromkeys(("p_scores", "p_cos_sin", "p_weight", "eps"), "*fp32") | {"eps": "fp32"}
    halves = dict.fromkeys(("p_q", "p_k", "p_keys", "p_norm", "p_bias", "p_cache"), "*bf16")
    kernels = {
        "store keys": (store_index_keys._store_keys, stored, {"num_warps": 1}),
        "scores": (
            index_scores._score,
            scored | {"KEYS": index_scores.KEYS, "PART": index_scores.PART},
            {"num_stages": 3},
        ),
        "counts": (choose_positions._count, parts | {"BYTE": 3}, {"num_warps": 8}),
        "choice": (choose_positions._write, parts, {"num_warps": 8}),
        "tokens": (gather_latents._list_tokens, {"TOKENS": gather_latents.TOKENS}, {}),
        "copies": (gather_latents._gather, copied | {"LATENTS": gather_latents.LATENTS}, {}),
    }
    found = {}
    for name, (kernel, constants, options) in kernels.items():
        types = floats | halves
        if name == "copies":
            types["p_out"] = "*bf16"
        own = {each: kind for each, kind in types.items() if each in kernel.arg_names}
        found[name] = shared_by(kernel, own, constants, **options)
    return found


def main() -> None:
    print(
        json.dumps(
            {"decode": attention(decodes=True), "prefill": attention(decodes=False)}
            | {"others": others()}
        )
    )


if __name__ == "__main__":
    main()
