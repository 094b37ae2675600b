"""The conformance suite: every operation of a platform beside its twin, in every type of weights
that it serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor

from ..platforms import specification
from ..platforms.device import Device
from .attention import attention_cases
from .case import NUM_ITEMS, Case, Line, examine
from .experts import expert_cases
from .indexers import indexer_cases
from .latents import latent_cases
from .rows import row_cases
from .sampling import sampling_cases
from .subject import EPS, NEEDED, Subject, rows_of

PARTS = ("rows", "experts", "attention", "latents", "indexers", "sampling", "hooks")
NEEDED_OF_SAMPLING = ("draw", "draw_filtered", "mask_tokens", "logprobs")


@torch.inference_mode()
def operation_lines(device: Device, dtype: str, parts: Container[str] = PARTS) -> Iterator[Line]:
    """Lines of the cases of some parts, each as soon as it is examined."""
    subject = Subject(device, dtype)
    lacking = _lacking(subject.platform())
    yield from (_failed(operation, "the platform lacks it") for operation in lacking)
    for part, cases in _CASES.items():
        if part in parts:
            yield from _lines_of(part, cases, subject)


def _lines_of(
    part: str, cases: Callable[[Subject], Iterator[Case]], subject: Subject
) -> Iterator[Line]:
    """Lines of one part. An error while a case is made, of a missing operation for example, is a
    line of the table too."""
    made = cases(subject)
    while True:
        try:
            case = next(made, None)
        except Exception as raised:
            problem = f"{type(raised).__name__}: {raised}".splitlines()[0]
            yield _failed(f"the rest of {part}", problem)
            return
        if case is None:
            return
        yield examine(case)


def _lacking(platform: Any) -> list[str]:
    lacking = [name for name in NEEDED if not hasattr(platform, name)]
    if hasattr(platform, "sampling"):
        lacking += [
            f"sampling.{name}"
            for name in NEEDED_OF_SAMPLING
            if not hasattr(platform.sampling, name)
        ]
    return lacking


def _failed(operation: str, problem: str) -> Line:
    return Line(
        operation=operation, shapes="", error=math.inf, allowed=0.0, bits="", problem=problem
    )


def _hook_cases(subject: Subject) -> Iterator[Case]:
    if subject.flags.host_blocks:
        yield _block_copy(subject)
    if subject.flags.graphs:
        yield _replay(subject)


def _block_copy(subject: Subject) -> Case:
    device: Any = subject.device
    platform = subject.platform()
    source = subject.integers(1 << 30, 2 * NUM_ITEMS, 462).int()
    sources, targets = (subject.permutation(2 * NUM_ITEMS)[:NUM_ITEMS].int() for _ in range(2))
    twin = torch.zeros_like(source)
    specification.copy_blocks(source, twin, sources, targets)

    def run(items: list[int]) -> list[Tensor]:
        target = torch.zeros_like(source).to(platform.device)
        places = rows_of(targets, items, platform)
        device.copy_blocks(
            source.to(platform.device), target, rows_of(sources, items, platform), places
        )
        return list(target[places.long()])

    return Case(
        operation="copy_blocks",
        shapes=f"{NUM_ITEMS} of {2 * NUM_ITEMS} blocks x{source.shape[1]}",
        run=run,
        expected=list(twin[targets.long()]),
        allowed=0.0,
    )


def _replay(subject: Subject) -> Case:
    """Case of a captured launch, whose replay must read the present values of its inputs."""
    device: Any = subject.device
    width = subject.size(131)
    platform = subject.platform(hidden=width)
    x = subject.randn(NUM_ITEMS, width)
    weight = subject.randn(width)
    on_device = weight.to(platform.device)

    def run(items: list[int]) -> list[Tensor]:
        given = torch.zeros(len(items), width, dtype=subject.dtype, device=platform.device)
        replay = device.capture(lambda: platform.rms_norm(given, on_device, EPS))
        given.copy_(x[items])
        return list(replay())

    return Case(
        operation="capture_and_replay",
        shapes=f"{NUM_ITEMS}x{width}",
        run=run,
        expected=list(specification.rms_norm(x, weight, EPS)),
        allowed=subject.allowed,
    )


_MAKERS = (
    row_cases,
    expert_cases,
    attention_cases,
    latent_cases,
    indexer_cases,
    sampling_cases,
    _hook_cases,
)
_CASES = dict(zip(PARTS, _MAKERS, strict=True))
