"""Checks greedy tokens of a whole model on a platform against a decoder over the twins, and alone
against in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..engine import Engine
from ..executors.build.single import build_executor
from ..layers.batch import ForwardBatch
from ..layers.linear.kinds import load_weights
from ..models import registry
from ..models.model import model_class
from ..options import ExecutorOptions, Progress
from ..platforms.capabilities import Capabilities
from ..request import NewRequest
from ..sampling_params import SamplingParams
from ..weights import model_file
from ..weights.model_config import ModelConfig
from .case import Line
from .reference import ReferencePlatform

MAX_GAPS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest distance of a chosen token's logit below the highest one of the reference; half a unit is
a ratio of 1.6."""
BLOCK_SIZE = 64
NUM_TOKENS = 16


def examine_model(
    folder: Path,
    device: str,
    flags: Capabilities,
    prompts: Sequence[Sequence[int]],
    progress: Progress,
) -> Line:
    """Checks a model; `prompts` are token ids. Raises `ConfigError` where the device does not serve
    the folder's model."""
    longest = max(map(len, prompts)) + NUM_TOKENS
    options = ExecutorOptions(
        model_folder=folder,
        device=device,
        block_size=BLOCK_SIZE if BLOCK_SIZE in flags.block_sizes else flags.block_sizes[0],
        num_blocks=256,
        max_model_len=-(-longest // 64) * 64,
        max_num_seqs=32,
        max_num_batched_tokens=256,
    )
    executor, config, facts = build_executor(options, progress)
    engine = Engine(config, executor)
    together = _answers(engine, prompts)
    alone = [_answers(engine, [prompt])[0] for prompt in prompts]
    executor.close()
    differing = [i for i, answer in enumerate(together) if answer != alone[i]]
    return Line(
        operation="model_greedy_tokens",
        shapes=f"{len(prompts)} prompts, {sum(map(len, together))} tokens",
        error=max(_gaps(folder, prompts, together, progress)),
        allowed=MAX_GAPS[facts.dtype],
        bits=f"prompt {differing[0]} alone" if differing else "equal",
    )


def _answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    answers: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        # Nothing is cached of a prompt in either arrangement.
        namespace = b"%08d%08d" % (i, len(prompts))
        engine.add(
            NewRequest(
                key=i,
                prompt_ids=list(prompt),
                output_ids=[],
                sampling=sampling,
                namespace=namespace,
            )
        )
    while engine.has_work():
        if (output := engine.step()) is None:
            continue
        at = 0
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            answers[key] += output.token_ids[at : at + num_tokens]
            at += num_tokens
    return answers


@torch.inference_mode()
def _gaps(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    progress: Progress,
) -> list[float]:
    """Distance of each chosen token's logit below the likeliest one's, by the reference's logits
    after the tokens before it."""
    progress("computing the reference", 0, 1)
    model = registry.read_config(folder)
    decoder_class = model_class(model)
    stored = model_file.load(folder, ReferencePlatform.device)
    wide = {name: tensor.float() for name, tensor in stored.items()}
    weights = load_weights(decoder_class.layout(model), wide, torch.float32)
    texts = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    decoder = decoder_class(model, weights, ReferencePlatform(), max(map(len, texts)))
    hidden = decoder.forward(_batch(texts), _cache(model, texts))
    gaps: list[float] = []
    for states, prompt, answer in zip(
        torch.split(hidden, [len(text) for text in texts]), prompts, answers, strict=True
    ):
        logits = decoder.logits(states[len(prompt) - 1 :])
        gaps += (logits.amax(1) - logits[torch.arange(len(answer)), torch.tensor(answer)]).tolist()
    progress("computing the reference", 1, 1)
    return [gap if math.isfinite(gap) else math.inf for gap in gaps]


def _batch(texts: Sequence[Sequence[int]]) -> ForwardBatch:
    """Batch of whole texts, each in a block of its own."""
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    owners = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(lengths))
    return ForwardBatch(
        token_ids=torch.tensor([token for text in texts for token in text]),
        positions=positions,
        slots=owners * max(lengths) + positions,
        starts=np.zeros(len(texts), np.int32),
        counts=np.array(lengths, np.int32),
        block_tables=torch.arange(len(texts), dtype=torch.int32)[:, None],
        sampled=torch.empty(0, dtype=torch.int64),
    )


def _cache(model: ModelConfig, texts: Sequence[Sequence[int]]) -> Tensor:
    block_size = max(map(len, texts))
    return torch.zeros(
        model.num_layers, 2, len(texts), model.num_kv_heads, block_size, model.head_dim
    )
