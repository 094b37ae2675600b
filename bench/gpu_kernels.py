"""Times every kernel on a GPU against what memory and arithmetic allow: a table, then JSON.

`python -m headwater.bench.gpu_kernels [--skip-tests] [--only PART ...]` runs the kernels' GPU tests
first and stops if one fails. Each figure is the median over replays of a CUDA graph whose calls
rotate through copies of their inputs, so that the cache does not help.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch

from headwater.kernels.gemm.gemm import configure_blas, linear
from headwater.kernels.gemm.wide_gemm import tiles_for, wide_gemm

from .attention_lengths import decodes, prefills
from .block_products import block_products
from .byte_layers import byte_layers
from .byte_products import byte_products
from .development import DevelopmentMissing, check_development
from .elementwise import elementwise
from .expert_products import expert_products
from .gpu_timing import (
    BYTES_PER_US,
    FLOPS_PER_US,
    Figure,
    copies_for,
    randn,
    timed,
    timed_in_turn,
)
from .int4_products import int4_products
from .latent_attention import latent_attention
from .program import program_name
from .sampling_cases import sampling
from .window_attention import window_attention

LINEARS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
LINEARS_8B = {name: size for name, size in LINEARS.items() if name.startswith("8B")}
NARROW_LINEARS = {
    "hidden 576 qkv": (960, 576),
    "hidden 576 o": (576, 576),
    "hidden 576 gate_up": (3072, 576),
    "hidden 576 down": (576, 1536),
    "hidden 576 head": (49_152, 576),
}


def linears(batch_sizes: tuple[int, ...]) -> Iterator[Figure]:
    for name, (n, k) in LINEARS.items():
        weights = [randn(n, k) for _ in range(copies_for(2 * n * k))]
        for m in batch_sizes:
            x = randn(m, k)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            limit = max(2 * (n * k + m * (n + k)) / BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US)
            calls = weights * (2 if len(weights) < 8 else 1)
            ours = timed([partial(linear, x, w, out) for w in calls])
            cublas = timed([partial(torch.mm, x, w.t(), out=out) for w in calls])
            dependent = timed([partial(linear, x, w, out, dependent=True) for w in calls])
            yield Figure(
                "linear",
                f"{name} M={m}",
                ours,
                limit,
                f"cuBLASLt {cublas:.1f}, dependent {dependent:.1f}",
            )


def products() -> Iterator[Figure]:
    """Times our product for many rows beside the library's, then with each of its tiles, as a base
    for choosing among them."""
    for name, (n, k) in (LINEARS | NARROW_LINEARS).items():
        weights = [randn(n, k) for _ in range(copies_for(2 * n * k))]
        for m in (64, 256, 512, 2048, 8192):
            x = randn(m, k)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            limit = max(2 * (n * k + m * (n + k)) / BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US)
            library = [partial(torch.mm, x, w.t(), out=out) for w in weights]
            ours, cublas = timed_in_turn([partial(wide_gemm, x, w, out) for w in weights], library)
            each = {
                str(tiles): timed(
                    [partial(wide_gemm, x, w, out, tiles) for w in weights], replays=7
                )
                for tiles in tiles_for(weights[0])
            }
            note = f"cuBLASLt {cublas:.1f}; " + ", ".join(
                f"{tiles} {us:.1f}" for tiles, us in each.items()
            )
            yield Figure("product of many rows", f"{name} M={m}", ours, limit, note)


def run_tests() -> None:
    try:
        check_development("kernels without --skip-tests")
    except DevelopmentMissing as missing:
        sys.exit(f"{program_name()}: {missing}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/kernels",
        "--confcutdir=tests/kernels",
    ]
    if subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir=.", "--import-mode=importlib"], check=False
    ).returncode:
        sys.exit("kernel tests failed: nothing is timed")


PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "linears": partial(linears, (1, 8, 16, 32, 64, 128)),
    "products": products,
    "int4": partial(int4_products, LINEARS_8B),
    "experts": expert_products,
    "bytes": partial(byte_products, LINEARS_8B),
    "byte-layers": byte_layers,
    "blocks": partial(block_products, LINEARS_8B),
    "decodes": decodes,
    "prefills": prefills,
    "windows": window_attention,
    "latents": latent_attention,
    "elementwise": elementwise,
    "sampling": sampling,
}


def main() -> None:
    parser = argparse.ArgumentParser(program_name(), description=__doc__)
    parser.add_argument("--skip-tests", action="store_true", help="time without testing first")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS)
    )
    options = parser.parse_args()
    if not options.skip_tests:
        run_tests()
    configure_blas()
    torch.manual_seed(0)
    figures = []
    for part in options.only:
        for figure in PARTS[part]():
            figures.append(figure)
            percent = 100 * figure.limit_us / figure.us
            print(
                f"{figure.kernel:24} {figure.case:28} {figure.us:9.1f} us {percent:5.0f} %  "
                f"{figure.note}",
                flush=True,
            )
        torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "figures": [asdict(figure) for figure in figures],
            }
        )
    )


if __name__ == "__main__":
    main()
