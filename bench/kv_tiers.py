"""`headwater bench kv-tiers`: how fast KV blocks go to host memory and to a disk and come back,
beside what the bus and the disk can do.

Host memory: a GPU's swapper copies all blocks out, in, and both ways at once; beside it the same
memory crosses in one piece. Disk: the disk tier writes blocks, forgets what the system has cached
of them and loads them; beside it threads read the same files as they are, in several numbers, of
which the fastest counts. The ways take turns.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer

from headwater.engine_core.executor import Int32Array, Swapper, SwapPlan
from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout
from headwater.engine_core.executors.tiers.memory_swapper import MemorySwapper
from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.block_source import Outcome, Owner
from headwater.engine_core.kv.disk.block_files import BlockFiles
from headwater.engine_core.kv.disk.disk_blocks import NUM_READERS, DiskBlocks

from .figures import print_table, seconds_of
from .program import check_choice, run_program
from .workloads import MODELS

KEY = bytes(16)
OWNER = Owner(bytes(16))
LOAD_BLOCKS = 32
"""Blocks of one load: a prompt of 2,048 tokens."""
PLAIN_READERS = (1, NUM_READERS, 8)
"""Numbers of threads that read plain files: the best of them measures the disk's bandwidth."""
POLL_SECONDS = 0.0005
"""About as often as an engine with a GPU looks."""
LOOK_SECONDS = 5e-5
"""Seconds between two looks at copies that take milliseconds."""
NOBODY = np.empty(0, np.int32)
PARTS = ("host", "disk")


def main(
    part: Annotated[
        list[str] | None, typer.Option(help="host, disk; repeatable; none: both")
    ] = None,
    model: Annotated[str, typer.Option(help="of the workloads: " + ", ".join(MODELS))] = "qwen3-8b",
    device: Annotated[
        str, typer.Option(help="where the KV cache is: cuda, cpu (disk alone)")
    ] = "cuda",
    num_blocks: Annotated[int, typer.Option(help="that cross", min=1)] = 256,
    block_size: Annotated[int, typer.Option(help="tokens a KV block", min=1)] = 64,
    folder: Annotated[Path | None, typer.Option(help="on the disk; none: a temporary one")] = None,
    runs: Annotated[int, typer.Option(help="of each way", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Measure the way of KV blocks to host memory and to a disk."""
    check_choice("model", model, MODELS)
    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(
            f"part is {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}"
        )
    check_choice("device", device, ("cuda", "cpu"))
    blocks = kv_blocks(model, num_blocks, block_size, torch.device(device))
    rows = []
    if device == "cuda" and "host" in (part or PARTS):
        rows += list(host_rates(swapper_of(blocks, num_blocks), num_blocks, runs))
    if "disk" in (part or PARTS):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            rows += disk_rates(
                swapper_of(blocks, num_blocks), Path(name), num_blocks, block_size, runs
            )
    if not as_json:
        columns = ("what", "GB/s", "the same bytes as they are, GB/s", "share")
        print_table(columns, (row.values() for row in rows))
    print(json.dumps(rows))


def kv_blocks(model: str, num_blocks: int, block_size: int, device: torch.device) -> KvBlocks:
    """bfloat16 blocks, with other numbers in each one."""
    config = MODELS[model]
    layout = KvLayout(
        config["num_hidden_layers"],
        config["num_key_value_heads"],
        config["head_dim"],
        torch.bfloat16,
    )
    blocks = KvBlocks.allocated([layout], num_blocks, block_size, device)
    blocks.kv_caches[0].add_(torch.arange(num_blocks, device=device).view(1, 1, -1, 1, 1, 1))
    return blocks


def swapper_of(blocks: KvBlocks, num_slots: int) -> Swapper:
    """A swapper with a slot for every block."""
    if blocks.memory.device.type == "cpu":
        return MemorySwapper.of(blocks.memory, num_slots)
    # It imports kernels, which a machine without a GPU may not have.
    swapper = import_module("headwater.engine_core.executors.tiers.cuda_swapper").CudaSwapper(
        blocks, num_slots
    )
    swapper.measure()
    return cast("Swapper", swapper)


def host_rates(swapper: Swapper, num_blocks: int, runs: int) -> Iterator[dict[str, Any]]:
    """A row for each direction, and one for both at once with the rate of either."""
    # Locked, as the swapper's own slots are.
    memory = torch.from_numpy(swapper.slots)
    device_memory = torch.empty((2, *memory.shape), dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]  # torch ships it so
    half = num_blocks // 2
    slots = np.arange(num_blocks, dtype=np.int32)
    # A cache gives slots in order, to blocks that are no neighbours.
    blocks = np.random.default_rng(0).permutation(slots)
    for what, outs, ins in (
        ("to host memory", slots, NOBODY),
        ("from host memory", NOBODY, slots),
        ("both at once, each", slots[:half], slots[half : 2 * half]),
    ):
        plan = SwapPlan(
            out_blocks=blocks[outs], out_slots=outs, in_slots=ins, in_blocks=blocks[ins]
        )
        ways = [
            (streams[0], device_memory[0], memory, outs),
            (streams[1], memory, device_memory[1], ins),
        ]
        num_bytes = max(len(outs), len(ins)) * swapper.slots.shape[1]
        ours, plain = alternated(partial(_swap, swapper, plan), partial(_cross, ways), runs)
        yield _row(what, num_bytes / ours, num_bytes / plain)


def _swap(swapper: Swapper, plan: SwapPlan) -> None:
    """Copies blocks and waits until they are there: copies out may be launched long after `swap`
    has returned."""
    saved = swapper.num_saved + plan.out_blocks.size
    loaded = swapper.num_loaded + plan.in_blocks.size
    swapper.swap(plan)
    while swapper.num_saved < saved or swapper.num_loaded < loaded:
        time.sleep(LOOK_SECONDS)


def _cross(
    ways: Sequence[tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor, Int32Array]],
) -> None:
    """Copies neighbouring slots in one piece."""
    for stream, source, target, slots in ways:
        if len(slots):
            with torch.cuda.stream(stream):
                piece = slice(int(slots[0]), int(slots[-1]) + 1)
                target[piece].copy_(source[piece], non_blocking=True)


def alternated(
    ours: Callable[[], None], plain: Callable[[], None], runs: int
) -> tuple[float, float]:
    """Median seconds of each until the device has done it; the first run of each does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs + 1):
        for one, taken in zip((ours, plain), seconds, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            one()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
    return median(seconds[0][1:]), median(seconds[1][1:])


def disk_rates(
    swapper: Swapper, folder: Path, num_blocks: int, block_size: int, runs: int
) -> list[dict[str, Any]]:
    """Rates at which blocks are written and loaded."""
    block_bytes = swapper.slots.shape[1]
    files = BlockFiles.open(folder, KEY, 2 * num_blocks * block_bytes, BlockSeal())
    tier = DiskBlocks(swapper, files, block_size=block_size)
    hashes = [number.to_bytes(16, "big") for number in range(1, num_blocks + 1)]
    begin = time.perf_counter()
    _write(tier, hashes)
    os.sync()
    written = time.perf_counter() - begin
    paths = [files.folder / OWNER.namespace.hex() / block_hash.hex() for block_hash in hashes]
    ways = [
        partial(_load, tier, hashes),
        *(partial(_read_plainly, paths, block_bytes, n) for n in PLAIN_READERS),
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(runs):
        for way, taken in zip(ways, seconds, strict=True):
            _forget(paths)
            taken.extend(seconds_of(way, 1))
    tier.close()
    num_bytes = num_blocks * block_bytes
    ours, *plain = map(median, seconds)
    return [
        _row("from the disk, cold", num_bytes / ours, num_bytes / min(plain)),
        {"what": "to the disk, until it is there", "gb_per_s": round(num_bytes / written / 1e9, 2)},
    ]


def _write(tier: DiskBlocks, hashes: Sequence[bytes]) -> None:
    """Saves blocks, as many at once as saves may have slots for."""
    at_once = max(1, len(hashes) // 2)
    for first in range(0, len(hashes), at_once):
        some = hashes[first : first + at_once]
        tier.save(some, range(first, first + len(some)), [b"", *some[:-1]], OWNER)
        while not all(each in tier.held for each in some):
            tier.launch()
            tier.poll()
            assert not tier.use.failure, tier.use.failure
            time.sleep(POLL_SECONDS)


def _load(tier: DiskBlocks, hashes: Sequence[bytes]) -> None:
    for first in range(0, len(hashes), LOAD_BLOCKS):
        some = hashes[first : first + LOAD_BLOCKS]
        tier.load(some, range(first, first + len(some)))
    num_missing = len(hashes)
    while num_missing:
        tier.launch()
        for end in tier.poll():
            assert end.outcome is Outcome.LOADED
            num_missing -= end.num_usable
        time.sleep(POLL_SECONDS)


def _read_plainly(paths: Sequence[Path], block_bytes: int, num_readers: int) -> None:
    """Reads the files by `num_readers` threads, each into memory that it reuses."""
    memory = [bytearray(2 * block_bytes) for _ in range(num_readers)]

    def read(reader: int) -> None:
        for path in paths[reader::num_readers]:
            with path.open("rb", buffering=0) as file:
                file.readinto(memory[reader])

    with ThreadPoolExecutor(num_readers) as threads:
        list(threads.map(read, range(num_readers)))


def _forget(paths: Sequence[Path]) -> None:
    """Drops the files, which are on the disk, from the system's page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _row(what: str, rate: float, plain: float) -> dict[str, Any]:
    """Rates in bytes a second."""
    return {
        "what": what,
        "gb_per_s": round(rate / 1e9, 2),
        "plain_gb_per_s": round(plain / 1e9, 2),
        "share": round(rate / plain, 3),
    }


if __name__ == "__main__":
    run_program(main)
