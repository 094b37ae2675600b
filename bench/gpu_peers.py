"""Figures of another engine for the workloads on NVIDIA H200s, and Headwater's targets. The figures
come from other machines: those of one kind differ by 1 to 2 %."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Figures by the id of a workload: seconds offline, tokens a second through a server."""

    name: str
    machine: str
    date: str
    figures: dict[str, float]
    targets: dict[str, float]
    """Headwater's."""

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "machine": self.machine,
            "date": self.date,
            "figures": self.figures,
        }


ONE_GPU = Peer(
    name="vLLM 0.23.0",
    machine="another machine with one NVIDIA H200, driver 580.159, torch 2.11.0+cu130 (L1 to L3, "
            "E1 to E4: vLLM 0.26.0; E2: derived from 6,500 tokens a second on an H100 NVL; "
            "E5: derived from 248 tokens a second, published for an H100; "
            "E6: from 13,858 of TensorRT-LLM; "
            "H1 to H3: from 4.16 ms a token, 126 ms to the first and "
            "21,029 tokens a second, in and out, of SGLang 0.5.16)",
    date="2026-11-21",
    figures={
        "O1": 6.08, "O2": 13.82, "O3": 1.339, "O4": 0.421, "O5": 1.715, "O6": 1.231, "O7": 0.0270,
        "O8": 5.73, "O9": 2.91, "L1": 24.43, "L2": 4.802, "L3": 3.661,
        "E1": 11.65, "E2": 10.08, "E3": 1.080, "E4": 1.183, "E5": 1.032, "E6": 37.83,
        "H1": 1.065, "H2": 0.126, "H3": 56.1,
        "S64": 15_900, "S256": 18_700, "S1024": 21_700, "T128": 8340,
    },
    targets={
        "O1": 4.9, "O2": 11.5, "O3": 1.03, "O4": 0.17, "O5": 1.60, "O6": 1.23, "O7": 0.021,
        "O8": 5.35, "O9": 1.15, "L1": 22.0, "L2": 4.25, "L3": 3.55,
        "E1": 9.4, "E2": 7.4, "E3": 0.58, "E4": 0.98, "E5": 0.366, "E6": 23.83,
        "H1": 0.54, "H2": 0.090, "H3": 42.1,
        "S64": 24_000, "S256": 32_000, "S1024": 36_000, "T128": 10_000,
    },
)  # fmt: skip
TWO_GPUS = Peer(
    name="vLLM 0.26.0 at tensor parallel size 2",
    machine="another machine with two NVIDIA H200",
    date="2026-11-22",
    figures={
        "O2": 8.09,
        "O3": 0.952,
        "O5": 1.032,
        "O6": 0.709,
        "L1": 13.77,
        "L2": 2.863,
        "L3": 2.042,
    },
    targets={"O2": 7.2, "O3": 0.68, "O5": 0.98, "O6": 0.67, "L1": 12.3, "L2": 2.25, "L3": 1.95},
)
PEERS = {1: ONE_GPU, 2: TWO_GPUS}
"""Keyed by the number of GPUs that divide a model."""
SAME_BITS = {"D1": "O2", "D3": "O3"}
"""The peer's figures with bits that do not depend on the batch: Headwater computes no others."""
