"""What cells run on: an engine in this process and a cluster of processes, over one model, on one
device."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.services.models.manifest import ModelManifest
from tests.combinations.asked import MAX_MODEL_LEN
from tests.combinations.capabilities import CAPABILITIES
from tests.combinations.capability import Refused
from tests.combinations.cells import CELLS, Cell, Ledger, check
from tests.combinations.cluster_world import (
    Cluster,
    ClusterWorld,
    EngineKind,
    kinds_of,
    running_cluster,
)
from tests.combinations.engine_world import EngineWorld

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENGINE_VOCAB_SIZE = 1024
"""Of the model of an engine without text."""
TEXT_VOCAB_SIZE = 4096
"""Of a model with text on a CPU. With all 49152 tokens, logits and draws took nine tenths of a step
(2026-11-22)."""
# Tools are left out of the prompt: it is as long with them as without.
TEMPLATE = """{% if tools %}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
RANDOM_ON_CPU = {"device": "cpu", "dtype": "float32", "load_format": "dummy"}
RANDOM_ON_GPU = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy"}
SIZES_ON_GPU = {"head_dim": 32}
"""Of a model whose attention has kernels on a GPU."""
DEVICE = "device"
SIMULATED = "simulated"
"""Families of engines."""


def write_config(folder: Path, **changes: Any) -> Path:
    """A random model of two layers."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def with_plain_template(model: Path, folder: Path) -> Path:
    """A copy of a model folder, its weights linked, with a short chat template and a short
    context."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    for weights in model.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"chat_template": TEMPLATE})
    )
    replace(ModelManifest.read(folder), max_model_len=MAX_MODEL_LEN).write(folder)
    return folder


def with_few_tokens(folder: Path, vocab_size: int = TEXT_VOCAB_SIZE) -> Path:
    """Cuts a folder's tokenizer to its first tokens: the special ones, those of bytes, and the
    first merges."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    vocab = {token: i for token, i in model["vocab"].items() if i < vocab_size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in vocab]
    model["vocab"] = vocab
    path.write_text(json.dumps(tokenizer))
    replace(ModelManifest.read(folder), vocab_size=vocab_size).write(folder)
    return folder


class Systems:
    """Started when the first cell wants them; `options` are those of every engine that computes."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        engine_folder: Path,
        text_folder: Path,
        options: dict[str, Any],
        heat: float = 1.0,
        refusals: Mapping[str, Refused] | None = None,
        is_rounded: bool = False,
        cells: Iterable[Cell] = CELLS.values(),
    ) -> None:
        """`heat`: see `Ledger`. `refusals`: of capabilities, by name, that this model's weights
        rule out. `is_rounded`: a CPU rounds the activations of this model, as a GPU does. `cells`:
        those that are run; a cluster has no engine for capabilities that none of them has."""
        self._stack = stack
        self._engine_folder = engine_folder
        self._text_folder = text_folder
        self._options = options
        self._heat = heat
        self._refusals = refusals or {}
        self._is_cpu = options["device"] == "cpu"
        self._is_rounded = is_rounded or not self._is_cpu
        self._wanted = {each.name for cell in cells for each in cell.both}
        self._in_process: dict[str, Ledger] = {}
        self._cluster: Cluster | None = None
        self._kinds: list[EngineKind] = []
        self._clusters: dict[str, Ledger] = {}

    def check(self, cell: Cell) -> str:
        """Runs a cell where it belongs. Returns what was seen."""
        if self._is_cpu:
            is_simulated = cell.is_simulated_on_cpu
            refused = cell.refused_on_cpu
        else:
            is_simulated = cell.is_simulated_on_gpu
            refused = cell.refused_on_gpu
        refused = refused or self._refusal_by_weights(cell)
        family = SIMULATED if is_simulated and refused is None else DEVICE
        note = " (simulated executor)" if family == SIMULATED else ""
        # An engine that refuses to start does so before any stage above it is asked.
        is_in_cluster = refused is None and cell.is_above_engine
        ledger = self._ledger_of_cluster(family) if is_in_cluster else self._engine(family)
        rounding = self._is_rounded and family == DEVICE
        refused = refused or cell.refused
        return check(cell, ledger, refused, rounding=rounding, is_gpu=not self._is_cpu) + note

    def _refusal_by_weights(self, cell: Cell) -> Refused | None:
        return next(
            (self._refusals[each.name] for each in cell.both if each.name in self._refusals), None
        )

    def _engine(self, family: str) -> Ledger:
        if family not in self._in_process:
            given = self._options if family == DEVICE else {"executor": "simulated"}
            world = EngineWorld(self._engine_folder, **given)
            self._stack.callback(world.close)
            self._in_process[family] = Ledger(world, self._heat)
        return self._in_process[family]

    def _ledger_of_cluster(self, family: str) -> Ledger:
        if self._cluster is None:
            self._kinds, self._cluster = self._start_cluster()
        if family not in self._clusters:
            self._clusters[family] = Ledger(
                ClusterWorld(self._cluster, self._kinds, family), self._heat
            )
        return self._clusters[family]

    def _start_cluster(self) -> tuple[list[EngineKind], Cluster]:
        refused = [
            each
            for each in CAPABILITIES
            if (each.refused_on_cpu if self._is_cpu else each.refused_on_gpu)
        ]
        wanted = [each for each in CAPABILITIES if each.name in self._wanted]
        slow = [each for each in wanted if each.needs_slow_prompts]
        on_device = [
            each
            for each in wanted
            if each not in (*refused, *slow) and each.name not in self._refusals
        ]
        simulated = [each for each in wanted if each in slow or (self._is_cpu and each in refused)]
        kinds = kinds_of(DEVICE, on_device) + kinds_of(
            SIMULATED, [each for each in simulated if each.is_simulated]
        )
        common = {DEVICE: self._options, SIMULATED: {"executor": "simulated"}}
        return kinds, self._stack.enter_context(running_cluster(self._text_folder, kinds, common))
