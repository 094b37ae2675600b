"""`headwater bench kv-swap`: prompts that come again when a GPU's KV cache has forgotten them.

All prompts are sent at once, a first and a second time; the cache holds some of them, host memory
none or all. One engine has no host memory and computes them again, the other offloads unused blocks
and loads them again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.engine_core.models import registry

from .figures import print_table
from .offline import Bench
from .program import check_choice, run_program
from .workloads import MODELS, uniform


def main(
    model: Annotated[str, typer.Option(help="of the workloads: " + ", ".join(MODELS))] = "qwen3-8b",
    num_prompts: Annotated[int, typer.Option(help="different ones")] = 24,
    prompt_len: Annotated[int, typer.Option(help="tokens of each")] = 8192,
    output_len: Annotated[int, typer.Option(help="tokens of each answer")] = 1,
    cached_share: Annotated[
        float, typer.Option(help="of the prompts that the GPU's cache holds, above 0, below 1")
    ] = 0.5,
    block_size: Annotated[int, typer.Option(help="tokens a KV block")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Measure what host memory saves."""
    check_choice("model", model, MODELS)
    if not 0 < cached_share < 1:
        raise typer.BadParameter(f"cached-share is {cached_share}; allowed: above 0, below 1")
    num_tokens = num_prompts * (prompt_len + output_len + block_size)
    options: dict[str, object] = {
        "device": "cuda",
        "load_format": "dummy",
        "block_size": block_size,
        "num_blocks": int(cached_share * num_tokens) // block_size,
        "max_num_batched_tokens": 8192,
        "max_model_len": prompt_len + output_len,
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        token_bytes = 2 * registry.read_config(folder).kv_elements_per_token
        for swap_memory in (0, num_tokens * token_bytes):
            bench = Bench(folder, options | {"kv_swap_memory": swap_memory})
            rows.append(
                {
                    "kv_swap_gb": round(swap_memory / 1e9, 1),
                    **twice(bench, num_prompts, prompt_len, output_len),
                }
            )
            bench.close()
    if not as_json:
        columns = ("host memory, GB", "first, s", "again, s", "tokens brought back", "start, s")
        print_table(columns, (row.values() for row in rows))
    print(json.dumps(rows))


def twice(bench: Bench, num_prompts: int, prompt_len: int, output_len: int) -> dict[str, Any]:
    """Seconds of both rounds, after other prompts have warmed everything up."""
    workload = uniform("", num_prompts, prompt_len, output_len)
    for _ in range(2):
        requests = list(bench.requests(workload))
        first, _steps = bench.answer(requests)
        before = bench.engine.load().num_swapped_in
        again, _steps = bench.answer(
            [bench.again(request, max_tokens=output_len) for request in requests]
        )
    return {
        "first_s": round(first, 3),
        "again_s": round(again, 3),
        "swapped_in_tokens": bench.engine.load().num_swapped_in - before,
        "start_s": round(bench.start_seconds, 1),
    }


if __name__ == "__main__":
    run_program(main)
