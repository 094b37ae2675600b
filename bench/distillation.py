"""Tunes a model to predict the next tokens of another model, on texts of that other one. Knows
neither files nor engines."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decoder_twin import DecoderTwin

HELD_BACK = 16
"""One text of HELD_BACK is used for measuring alone."""
WARM_UP = 0.05
"""Share of the time in which the learning rate rises; afterwards it falls as a cosine."""
LEAST_RATE = 0.02
"""Share of the learning rate that is left at the end."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a prompt and its answer. Prompt tokens are not learned."""

    token_ids: list[int]
    num_prompt: int
    temperature: float = 0.0
    """Temperature at which the answer was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Length and speed of tuning."""

    steps: int
    """Largest number of steps."""
    seconds: float = math.inf
    """Seconds after which no further step begins."""
    learning_rate: float = 5e-4
    batch_tokens: int = 4096
    """Number of tokens in a step, padding included."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Similarity of a student to its teacher, over tokens of answers that it has not seen."""

    divergence: float
    """Mean Kullback-Leibler divergence from the teacher, in nats."""
    overlap: float
    """Mean of the probability that two distributions share: what rejection sampling accepts at
    temperature 1."""
    agreement: float
    """Share of tokens with the same likeliest next token: what is accepted at temperature 0."""


def distill(
    student: DecoderTwin,
    teacher: DecoderTwin,
    texts: Sequence[Text],
    tuning: Tuning,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Tunes all tensors of the student but embedding and head, in place, by AdamW on the divergence
    from the teacher's distribution after each token of the answers. `report`: step and its loss."""
    tuned = [tensor for name, tensor in student.tensors.items() if name not in ("embed", "lm_head")]
    tune(
        tuned,
        lambda batch: _divergence(*_logits(student, teacher, batch)),
        split(texts)[0],
        tuning,
        report,
    )


def tune(
    tuned: Sequence[Tensor],
    loss_of: Callable[[Sequence[Text]], Tensor],
    texts: Sequence[Text],
    tuning: Tuning,
    report: Callable[[int, float], None] = lambda step, loss: None,
    *,
    matrices: Sequence[Tensor] = (),
) -> None:
    """Tunes tensors in place on the loss over batches of the texts: matrices by Muon (Jordan et
    al., 2024), all others by AdamW. `report`: step and its loss."""
    rate = tuning.learning_rate
    everything = [*tuned, *matrices]
    for tensor in everything:
        tensor.requires_grad_(True)
    optimizers: list[torch.optim.Optimizer] = []
    if tuned:
        optimizers.append(torch.optim.AdamW(tuned, lr=rate, betas=(0.9, 0.95), weight_decay=0.01))
    if matrices:
        # Updates are as large as AdamW's, so one learning rate suits both.
        muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    batches = _batches(texts, tuning)
    began = time.monotonic()
    losses = deque[tuple[int, Tensor]]()
    for step in range(tuning.steps):
        share = max(step / tuning.steps, (time.monotonic() - began) / tuning.seconds)
        if share >= 1:
            break
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate * _pace(share)
        loss = loss_of(next(batches))
        for tensor in everything:
            tensor.grad = None
        loss.backward()  # type: ignore[no-untyped-call]  # torch ships it so
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append((step, loss.detach()))
        # The host waits for the step before this one, which a GPU computes meanwhile.
        if len(losses) > 1:
            _report_oldest(losses, report)
    if losses:
        _report_oldest(losses, report)
    for tensor in everything:
        tensor.requires_grad_(False)


def _report_oldest(losses: deque[tuple[int, Tensor]], report: Callable[[int, float], None]) -> None:
    step, loss = losses.popleft()
    report(step, loss.item())


@torch.no_grad()
def quality(
    student: DecoderTwin, teacher: DecoderTwin, texts: Sequence[Text], tuning: Tuning
) -> Quality:
    """Quality over the texts that `distill` leaves out."""
    divergence = overlap = agreement = 0.0
    num_tokens = 0
    for batch in packed(split(texts)[1], tuning.batch_tokens):
        ours, theirs = _logits(student, teacher, batch)
        divergence += _divergence(ours, theirs).item() * len(ours)
        overlap += torch.minimum(ours.softmax(1), theirs.softmax(1)).sum().item()
        agreement += (ours.argmax(1) == theirs.argmax(1)).sum().item()
        num_tokens += len(ours)
    return Quality(
        divergence=divergence / num_tokens,
        overlap=overlap / num_tokens,
        agreement=agreement / num_tokens,
    )


def _logits(
    student: DecoderTwin, teacher: DecoderTwin, texts: Sequence[Text]
) -> tuple[Tensor, Tensor]:
    """Both models' logits after each token from a prompt's last to an answer's last but one,
    float32 [N, V]."""
    device = student.tensors["embed"].device
    token_ids, is_learned = padded(texts, device)
    with computing(device):
        ours = student.logits(student.hidden(token_ids)[is_learned])
        with torch.no_grad():
            theirs = teacher.logits(teacher.hidden(token_ids)[is_learned])
    return ours, theirs


def padded(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], and whether the distribution after a token is learned [B, T]: from a
    prompt's last token to an answer's last but one."""
    longest = max(len(text.token_ids) for text in texts)
    token_ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    is_learned = torch.zeros(len(texts), longest, dtype=torch.bool)
    for i, text in enumerate(texts):
        token_ids[i, : len(text.token_ids)] = torch.tensor(text.token_ids)
        is_learned[i, max(text.num_prompt - 1, 0) : len(text.token_ids) - 1] = True
    return token_ids.to(device), is_learned.to(device)


def computing(device: torch.device) -> torch.autocast:
    """Scope in which products are computed in bfloat16 on a GPU, and everything in float32 on a
    CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    expected = theirs.log_softmax(1)
    return (expected.exp() * (expected - ours.log_softmax(1))).sum(1).mean()


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts that are learned, and those that are held back."""
    answers = [text for text in texts if len(text.token_ids) > max(text.num_prompt, 1)]
    held = answers[::HELD_BACK]
    return [text for i, text in enumerate(answers) if i % HELD_BACK] or held, held


def _batches(texts: Sequence[Text], tuning: Tuning) -> Iterator[list[Text]]:
    """Yields batches without end; each text comes once a round, beside others of about its
    length."""
    generator = torch.Generator().manual_seed(tuning.seed)
    while True:
        order = torch.randperm(len(texts), generator=generator).tolist()
        batches = packed([texts[i] for i in order], tuning.batch_tokens)
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]


def packed(texts: Sequence[Text], batch_tokens: int) -> list[list[Text]]:
    """Batches of texts of about the same length."""
    batches: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: len(text.token_ids)):
        if not batches or (len(batches[-1]) + 1) * len(text.token_ids) > batch_tokens:
            batches.append([])
        batches[-1].append(text)
    return batches


def _pace(share: float) -> float:
    """Factor of the learning rate at this share of the time."""
    if share < WARM_UP:
        return (share + 0.01) / (WARM_UP + 0.01)
    return (
        LEAST_RATE
        + (1 - LEAST_RATE) * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP))) / 2
    )
