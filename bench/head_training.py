"""Trains draft heads on texts of the model that they draft for, and measures how many of their
drafts would stand. Knows neither files nor engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, smooth_l1_loss

from headwater.engine_core.heads.heads_config import EAGLE, HeadsConfig

from .distillation import Text, Tuning, computing, packed, split, tune
from .head_twins import HeadsTwin
from .teacher_states import Taught, TeacherStates

MATRICES = ("fc.weight", "_proj.weight", "linear.weight")
"""Ends of names of matrices between hidden states, which Muon tunes."""
REGRESSION_WEIGHT = 0.2
"""Weight of the distance between the hidden state that EAGLE predicts and the next one, beside the
cross entropy."""
LINK_WEIGHT = 0.6
"""Weight of a link of a chain against the one before it: that one has to stand first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of all chains of a batch, at the N places whose draft is learned."""

    hidden: Tensor
    """[N, H]"""
    rows: Tensor
    """int64 [N]: for each place, the row of the model's distribution that it has to draft."""
    at: tuple[Tensor, Tensor]
    """Text and position of each place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuality:
    """Quality of chains over answers that were held back, all drawn at one temperature."""

    temperature: float
    tokens_per_step: float
    """Number of tokens of a step, the sampled one counted, where each step verifies a whole
    chain."""
    stands: tuple[float, ...]
    """Share of the reached links that stand, by place in the chain."""


def train_heads(
    config: HeadsConfig,
    heads: HeadsTwin,
    states: TeacherStates,
    texts: Sequence[Text],
    tuning: Tuning,
    depth: int,
    report: Callable[[int, float], None],
) -> None:
    """Tunes all tensors of the heads, in place. EAGLE learns chains of `depth` links as they are
    served, each link on the output of the one before it (training-time test, Li et al. 2025)."""

    vocabulary = states.teacher.vocabulary
    # The model's distribution over the tokens that the heads draft among.
    if heads.token_ids is not None:
        vocabulary = vocabulary[heads.token_ids]

    def loss_of(batch: Sequence[Text]) -> Tensor:
        taught = states.of(batch)
        with computing(taught.final.device):
            wanted = linear(taught.final[taught.is_learned], vocabulary).float().softmax(1)
            total = wanted.new_zeros(())
            weights = 0.0
            for i, link in enumerate(_links(heads, taught, depth)):
                loss = (
                    -(wanted[link.rows] * heads.logits(i, link.hidden).log_softmax(1)).sum(1).mean()
                )
                if config.kind == EAGLE:
                    text, position = link.at
                    following = taught.final[text, position + 1].float()
                    loss = loss + REGRESSION_WEIGHT * smooth_l1_loss(link.hidden.float(), following)
                total = total + LINK_WEIGHT**i * loss
                weights = weights + LINK_WEIGHT**i
        return total / weights

    is_matrix = {name: name.endswith(MATRICES) for name in heads.tensors}
    matrices = [tensor for name, tensor in heads.tensors.items() if is_matrix[name]]
    others = [tensor for name, tensor in heads.tensors.items() if not is_matrix[name]]
    tune(others, loss_of, split(texts)[0], tuning, report, matrices=matrices)


@torch.no_grad()
def chain_quality(
    heads: HeadsTwin, states: TeacherStates, texts: Sequence[Text], tuning: Tuning, depth: int
) -> list[ChainQuality]:
    """Quality on texts that training leaves out, by temperature. Drafts share the noise of the
    draw that verifies them, which is drawn as it is distributed beside the token that the answer
    has."""
    found = []
    for temperature in sorted({text.temperature for text in texts}):
        held = [text for text in split(texts)[1] if text.temperature == temperature]
        num_reached = [0] * depth
        num_right = [0] * depth
        num_tokens = 0
        num_steps = 0
        for batch in packed(held, tuning.batch_tokens):
            is_right = _right_drafts(heads, states, batch, depth, temperature).tolist()
            for text, right in zip(batch, is_right, strict=True):
                # The first token of an answer has no draft.
                at = text.num_prompt + 1
                while at < len(text.token_ids):
                    run = next((i for i in range(depth) if not right[i][at]), depth)
                    for i in range(depth):
                        num_reached[i] += run >= i
                        num_right[i] += run > i
                    num_left = len(text.token_ids) - at
                    num_tokens = num_tokens + min(run + 1, num_left)
                    num_steps = num_steps + 1
                    at = at + run + 1
        if num_steps:
            stands = tuple(
                right / max(reached, 1)
                for right, reached in zip(num_right, num_reached, strict=True)
            )
            quality = ChainQuality(
                temperature=temperature, tokens_per_step=num_tokens / num_steps, stands=stands
            )
            found.append(quality)
    return found


def _right_drafts(
    heads: HeadsTwin, states: TeacherStates, texts: Sequence[Text], depth: int, temperature: float
) -> Tensor:
    """Whether link i of the chain whose first draft is the token at t is right, given that those
    before it are, bool [B, depth, T + depth]."""
    taught = states.of(texts)
    num_texts, length = taught.token_ids.shape
    is_right = torch.zeros(
        num_texts, depth, length + depth, dtype=torch.bool, device=taught.final.device
    )
    with computing(taught.final.device):
        theirs = states.teacher.logits(taught.final[taught.is_learned])
        text, position = taught.is_learned.nonzero(as_tuple=True)
        spoken = taught.token_ids[text, position + 1]
        noise = (
            torch.zeros_like(theirs)
            if temperature == 0
            else shared_noise(theirs / temperature, spoken)
        )
        for i, link in enumerate(_links(heads, taught, depth)):
            ours = heads.logits(i, link.hidden) / (temperature or 1.0)
            own_noise = noise[link.rows]
            if heads.token_ids is not None:
                own_noise = own_noise[:, heads.token_ids]
            drafted = (ours.log_softmax(1) + own_noise).argmax(1)
            drafted = drafted if heads.token_ids is None else heads.token_ids[drafted]
            text, position = link.at
            is_right[text, i, position + 2 - i] = drafted == spoken[link.rows]
    return is_right


def shared_noise(logits: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [N, V], drawn as it is distributed where the tokens [N] were drawn from logits
    [N, V] with it."""
    logprobs = logits.log_softmax(1)
    uniform = torch.rand_like(logprobs).clamp_(1e-30, 1 - 1e-7)
    free = logprobs - (-uniform.log()).log()
    # The largest sum is independent of which token has it; all others lie below it (Maddison et
    # al., 2014).
    top = -(-torch.rand_like(logprobs[:, :1]).clamp_(1e-30, 1 - 1e-7).log()).log()
    below = -torch.logaddexp(-top.expand_as(free), -free)
    return below.scatter(1, tokens[:, None], top) - logprobs


def _links(heads: HeadsTwin, taught: Taught, depth: int) -> Iterator[Link]:
    """Links of chains. Place p of a link drafts the model's token behind position p + 1."""
    is_learned = taught.is_learned
    numbers = is_learned.flatten().cumsum(0).view_as(is_learned) - 1
    positions = torch.arange(is_learned.shape[1], device=is_learned.device)
    is_wanted = is_learned.roll(-1, dims=1)
    is_wanted[:, -1] = False
    for i, hidden in enumerate(heads.links(taught.token_ids, taught.final, taught.inputs, depth)):
        text, position = (is_wanted & (positions >= i)).nonzero(as_tuple=True)
        at = text, position
        yield Link(hidden=hidden[at], rows=numbers[text, position + 1], at=at)
