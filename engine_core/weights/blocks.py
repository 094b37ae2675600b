"""Weights in GGUF's block formats on their way from a file to a model's file, where they stay
packed.

A weight may have parts of several formats, since projections that are joined into one matrix need
not have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headwater.kernels.quant.block_formats import FORMATS, TILE_ROWS, BlockWeight, expand

from ..config import ConfigError, require

BLOCKS = ".blocks"
PARTS = ".parts"
"""Names of the tensors in a model's file, behind the weight's: uint8 [bytes] tiles of all parts,
and int32 [parts, 3] ggml's number of the type, rows and inputs of each."""
Parts = tuple[BlockWeight, ...]


def named(parts: Sequence[BlockWeight], name: str) -> dict[str, torch.Tensor]:
    """The tensors of a weight as a model's file holds them."""
    merged = _merged(parts)
    facts = [(part.format.type_id, *part.shape) for part in merged]
    blocks = torch.cat([part.tiles.flatten() for part in merged])
    return {name + BLOCKS: blocks, name + PARTS: torch.tensor(facts, dtype=torch.int32)}


def num_bytes(facts: Sequence[Sequence[int]]) -> int:
    """Size of the tiles of all parts; a part's facts are its type, rows and inputs."""
    return sum(_part_bytes(*each) for each in facts)


def facts_of(parts: torch.Tensor) -> list[list[int]]:
    """The rows of a tensor of parts. Raises `ConfigError`."""
    if parts.dtype != torch.int32 or parts.dim() != 2 or parts.shape[1] != 3:
        raise ConfigError(
            "parts of block weights", (str(parts.dtype), tuple(parts.shape)), "int32, [parts, 3]"
        )
    facts: list[list[int]] = parts.tolist()
    for type_id, rows, inputs in facts:
        require(type_id in FORMATS, "type of block weights", type_id, ", ".join(map(str, FORMATS)))
        if rows < 1 or inputs < 1 or inputs % FORMATS[type_id].unit:
            allowed = f"1 and more of multiples of {FORMATS[type_id].unit}"
            raise ConfigError("rows and inputs of block weights", (rows, inputs), allowed)
    return facts


def stored_parts(blocks: torch.Tensor, parts: torch.Tensor) -> Parts:
    """The parts of a weight, views of its tensors. Raises `ConfigError`."""
    facts = facts_of(parts)
    if blocks.dtype != torch.uint8 or tuple(blocks.shape) != (num_bytes(facts),):
        raise ConfigError(
            "block weights",
            (str(blocks.dtype), tuple(blocks.shape)),
            f"uint8, ({num_bytes(facts)},)",
        )
    found = []
    at = 0
    for type_id, rows, inputs in facts:
        format = FORMATS[type_id]
        size = _part_bytes(type_id, rows, inputs)
        tiles = blocks[at : at + size].view(
            -1, inputs // format.unit, TILE_ROWS * format.unit_bytes
        )
        found.append(BlockWeight(format=format, tiles=tiles, num_rows=rows))
        at += size
    return tuple(found)


def cut_parts(parts: Parts, outputs: Sequence[range], inputs: range) -> Parts:
    """Part of a weight: some of its outputs and inputs. Of mapped tiles it reads no others. Raises
    `ConfigError` where a tile or a unit would be cut."""
    found = []
    first = 0
    for part in parts:
        # Ranges are in ascending order, so parts of the result are as well.
        for wanted in outputs:
            begin = max(wanted.start - first, 0)
            end = min(wanted.stop - first, part.num_rows)
            if begin < end:
                found.append(_cut_part(part, range(begin, end), inputs))
        first += part.num_rows
    return tuple(found)


def can_cut(parts: Parts, outputs: Sequence[range], inputs: range) -> bool:
    """Whether `cut_parts` cuts a weight there."""
    first = 0
    for part in parts:
        own = [
            (max(each.start - first, 0), min(each.stop - first, part.num_rows)) for each in outputs
        ]
        try:
            for begin, end in own:
                if begin < end:
                    _check_cut(part, range(begin, end), inputs)
        except ConfigError:
            return False
        first += part.num_rows
    return True


def _check_cut(part: BlockWeight, rows: range, inputs: range) -> None:
    """Raises `ConfigError` where a tile or a unit would be cut."""
    unit = part.format.unit
    if rows.start % TILE_ROWS or (rows.stop % TILE_ROWS and rows.stop != part.num_rows):
        raise ConfigError(
            "outputs of a rank",
            len(rows),
            f"multiples of {TILE_ROWS}, as {part.format.name} is stored",
        )
    if inputs.start % unit or inputs.stop % unit:
        raise ConfigError(
            "inputs of a rank", len(inputs), f"multiples of {unit}, as {part.format.name} is stored"
        )


def _cut_part(part: BlockWeight, rows: range, inputs: range) -> BlockWeight:
    _check_cut(part, rows, inputs)
    unit = part.format.unit
    tiles = part.tiles[
        rows.start // TILE_ROWS : -(-rows.stop // TILE_ROWS),
        inputs.start // unit : inputs.stop // unit,
    ]
    return BlockWeight(format=part.format, tiles=tiles.contiguous(), num_rows=len(rows))


def expand_all(
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    keeps: Callable[[str, Parts], bool] = lambda name, parts: False,
) -> None:
    """Expands every packed weight of a model's file to the dtype, but those that `keeps` accepts,
    one after another: both forms of all weights are never in memory at once. Raises `ConfigError`
    naming a weight that cannot be expanded."""
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        require(
            name + PARTS in tensors,
            "checkpoint",
            f"without {name}{PARTS}",
            "every tensor of the architecture",
        )
        try:
            weight = stored_parts(tensors[name + BLOCKS], tensors[name + PARTS])
            if keeps(name, weight):
                continue
            del tensors[name + BLOCKS], tensors[name + PARTS]
            tensors[name] = dense(weight, dtype)
        except ConfigError as error:
            raise error.of(name) from None


def dense(parts: Sequence[BlockWeight], dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in the dtype."""
    return torch.cat([expand(part, dtype) for part in parts])


def _part_bytes(type_id: int, rows: int, inputs: int) -> int:
    format = FORMATS[type_id]
    return -(-rows // TILE_ROWS) * TILE_ROWS * (inputs // format.unit) * format.unit_bytes


def _merged(parts: Sequence[BlockWeight]) -> list[BlockWeight]:
    """Neighbours of one format as one part, where all but the last fill their tiles: fewer
    products."""
    runs: list[list[BlockWeight]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and last.format == part.format and last.num_rows % TILE_ROWS == 0:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _joined(parts: Sequence[BlockWeight]) -> BlockWeight:
    """Concatenates parts of one format."""
    if len(parts) == 1:
        return parts[0]
    tiles = torch.cat([part.tiles for part in parts])
    num_rows = sum(part.num_rows for part in parts)
    return BlockWeight(format=parts[0].format, tiles=tiles, num_rows=num_rows)
