"""Capabilities that change the weights of a model: one for each kind of its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.combinations.capability import Aside, Capability, Promise, Refused
from tests.combinations.weights_folder import FP8_BLOCKS, W8A8

METHODS = {FP8_BLOCKS: "fp8", W8A8: "compressed-tensors"}
"""Value of `quantization` for kinds that checkpoints have under the name of a method."""


def _weights(kind: str, name: str = "", **others: Any) -> Capability:
    """Linear layers of another kind than the model's own."""
    return Capability(
        name=f"{name or kind} weights",
        promise=Promise.OWN,
        options={"quantization": METHODS.get(kind, kind)},
        weights=kind,
        took_place=lambda answer: answer.weights == kind,
        may_coincide=True,
        is_simulated=False,
        **others,
    )


def refused_beside(method: str, others: Mapping[str, str]) -> dict[str, Refused]:
    """Pairs with kinds of other methods: each engine is told the method `method`, and its model has
    the other."""
    return {
        f"{name} weights": Refused(
            field="quantization", says=f"quantization is '{method}'; allowed: auto or {other}"
        )
        for name, other in others.items()
    }


FP8_WEIGHTS = _weights("fp8")
INT4_WEIGHTS = _weights(
    "int4", settings=frozenset({"activation_dtype"}), beside=refused_beside("fp8", {"fp8": "int4"})
)
GGUF_WEIGHTS = _weights(
    "gguf", "GGUF", beside=refused_beside("gguf", {"int4": "int4", "fp8": "fp8"})
)
FP8_BLOCK_WEIGHTS = _weights(
    FP8_BLOCKS,
    "FP8 block",
    beside={
        **refused_beside("fp8", {"int4": "int4", "GGUF": "gguf"}),
        FP8_WEIGHTS.name: Aside(
            because="a model has weights of one kind, and both go by the name fp8"
        ),
    },
)
W8A8_WEIGHTS = _weights(
    W8A8,
    "W8A8",
    beside={
        **refused_beside(
            "compressed-tensors", {"int4": "int4", "fp8": "fp8", "GGUF": "gguf", "FP8 block": "fp8"}
        ),
        "tensor parallel": Refused(
            field="tensor_parallel_size",
            says="allowed: 1 with weights whose tokens are rounded to int8, each with one scale",
        ),
    },
)
