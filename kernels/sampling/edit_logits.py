"""Edits the logits of all positions of a step as their requests ask: allowed ids, bad words, ids
that are blocked before a minimum length, bias, and penalties for repetition, presence and
frequency.

What a request asks is packed once, see `Edits.packed`; the tokens before a position, drafts among
them, are read from the request table. A constant number of launches, whatever the positions, so
that a graph can hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Int32Array = npt.NDArray[np.int32]

BLOCK = 4096
LIST_BLOCK = 256
"""Number of tokens, ids or words of a list that a program processes together."""
COUNTERS = 16
"""Number of programs that count the tokens before a position."""
EDIT_OPTIONS = {"enable_fp_fusion": False}
"""Launch option: products and sums are rounded apart, as the twin rounds them."""

NUM_PROMPT = tl.constexpr(0)
MIN_TOKENS = tl.constexpr(1)
HAS_PENALTIES = tl.constexpr(2)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
NUM_BIASES = tl.constexpr(6)
BIASES = tl.constexpr(7)
NUM_BLOCKED = tl.constexpr(8)
BLOCKED = tl.constexpr(9)
NUM_WORDS = tl.constexpr(10)
WORDS = tl.constexpr(11)
LONGEST_WORD = tl.constexpr(12)
ALLOWED = tl.constexpr(13)
IN_PROMPT = tl.constexpr(14)
HEADER = tl.constexpr(16)
"""Number of header words; those that hold the start of a list are 0 where there is no list."""

SLOT = tl.constexpr(20)
"""Lowest bit of a mark's bias; below it are the bits of its count."""
COUNT = tl.constexpr((1 << SLOT.value) - 1)
MOST_TOKENS = 1 << SLOT.value
MOST_BIASES = (1 << (31 - SLOT.value)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Changes that one request makes to the logits of each of its positions."""

    prompt_ids: Int32Array
    allowed_ids: Sequence[int] = ()
    """Ids that stay allowed; all others are forbidden. Empty: no restriction."""
    bad_words: Sequence[Sequence[int]] = ()
    """Sequences of ids; the last token of each is forbidden where the others are the last
    outputs."""
    min_tokens: int = 0
    blocked_ids: Sequence[int] = ()
    """Ids that are forbidden while there are fewer than min_tokens outputs."""
    biases: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1, 0, 0)

    def packed(self, vocab_size: int) -> Int32Array:
        """The edits as the kernels read them: a header, the lists that it points to, and sets of
        tokens, a bit each."""
        assert len(self.biases) <= MOST_BIASES
        header = np.zeros(HEADER.value, np.int32)
        parts = [header]
        size = len(header)

        def append(part: Int32Array) -> int:
            nonlocal size
            parts.append(part)
            size += len(part)
            return size - len(part)

        header[NUM_PROMPT.value] = len(self.prompt_ids)
        header[MIN_TOKENS.value] = min(self.min_tokens, MOST_TOKENS)
        if self.has_penalties:
            header[HAS_PENALTIES.value] = 1
            strengths = np.array([self.repetition, self.presence, self.frequency], np.float32)
            header[REPETITION.value : FREQUENCY.value + 1] = strengths.view(np.int32)
        if self.biases:
            header[NUM_BIASES.value] = len(self.biases)
            header[BIASES.value] = append(np.array(list(self.biases), np.int32))
            append(np.array(list(self.biases.values()), np.float32).view(np.int32))
        if self.blocked_ids and self.min_tokens:
            header[NUM_BLOCKED.value] = len(self.blocked_ids)
            header[BLOCKED.value] = append(np.array(self.blocked_ids, np.int32))
        if self.bad_words:
            lengths = np.array([len(word) for word in self.bad_words], np.int32)
            header[NUM_WORDS.value] = len(lengths)
            header[LONGEST_WORD.value] = lengths.max()
            # End and number of each word's tokens; then the tokens of all words.
            first = size + 2 * len(lengths)
            header[WORDS.value] = append((first + np.cumsum(lengths)).astype(np.int32))
            append(lengths)
            append(np.array([token for word in self.bad_words for token in word], np.int32))
        if self.allowed_ids:
            header[ALLOWED.value] = append(_bits(np.array(self.allowed_ids, np.int32), vocab_size))
        if self.repetition != 1:
            header[IN_PROMPT.value] = append(_bits(self.prompt_ids, vocab_size))
        return np.concatenate(parts)


def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    output_indices: torch.Tensor,
    token_table: torch.Tensor,
    addresses: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Edits logits [P, V] into out float32 [P, V], contiguous. rows int32 [P] of the table,
    negative for padding; positions int32 [P] of the last known token; output_indices int32 [P].

    token_table int32 [rows, …]; addresses int64 [rows, n], of which column 0 is where each row's
    packed edits lie, 0 if it has none.
    """
    num_positions, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert out.is_contiguous()
    assert token_table.shape[1] <= MOST_TOKENS
    marks = out.view(torch.int32)
    stretches = triton.cdiv(vocab_size, BLOCK)
    table = rows, positions, token_table, addresses
    strides = token_table.stride(0), addresses.stride(0)
    # The marks of a token lie where its edited logit will.
    _clear_marks[(num_positions, stretches)](
        rows, addresses, marks, strides[1], vocab_size, BLOCK=BLOCK
    )
    _mark[(num_positions, COUNTERS)](
        *table, marks, *strides, vocab_size, COUNTERS=COUNTERS, BLOCK=LIST_BLOCK
    )
    _edit[(num_positions, stretches)](
        logits,
        rows,
        addresses,
        marks,
        out,
        logits.stride(0),
        strides[1],
        vocab_size,
        BLOCK=BLOCK,
        **EDIT_OPTIONS,
    )
    _forbid[(num_positions,)](*table, output_indices, out, *strides, vocab_size, BLOCK=LIST_BLOCK)


def edit_twin(
    logits: torch.Tensor, edits: Edits, output_index: int, output_ids: torch.Tensor
) -> None:
    """Edits one row, float32 or better [V], in place, in plain torch; output_ids int32 [n] are the
    outputs before it."""
    if edits.allowed_ids:
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        forbidden[list(edits.allowed_ids)] = False
        logits.masked_fill_(forbidden, float("-inf"))
    for word in edits.bad_words:
        if len(word) == 1 or output_ids[max(0, len(output_ids) - len(word) + 1) :].tolist() == list(
            word[:-1]
        ):
            logits[word[-1]] = float("-inf")
    if output_index < edits.min_tokens:
        logits[list(edits.blocked_ids)] = float("-inf")
    if edits.biases:
        logits[list(edits.biases)] += torch.tensor(
            list(edits.biases.values()), device=logits.device
        )
    if edits.has_penalties:
        _penalize_twin(logits, edits, output_ids)


def _penalize_twin(logits: torch.Tensor, edits: Edits, output_ids: torch.Tensor) -> None:
    counts = torch.bincount(output_ids.long(), minlength=len(logits))
    in_output = counts > 0
    seen = in_output.clone()
    seen[torch.from_numpy(edits.prompt_ids).to(logits.device).long()] = True
    strengths = (edits.repetition, edits.presence, edits.frequency)
    repetition, presence, frequency = (
        torch.tensor([strength], device=logits.device) for strength in strengths
    )
    factor = torch.where(seen, repetition, 1.0)
    x = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(x - frequency * counts - presence * in_output)


def _bits(ids: Int32Array, vocab_size: int) -> Int32Array:
    """Set of tokens as one bit each, in 32-bit words, lowest bit first."""
    is_in = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_in[ids] = True
    words: Int32Array = np.packbits(is_in, bitorder="little").view(np.int32)
    return words


@triton.jit
def _edits_of(p_row, p_address, stride_address, i_position):
    """Table row of a position, and address of its packed edits; 0 if it has none."""
    row = tl.load(p_row + i_position).to(tl.int64)
    address = tl.load(p_address + row * stride_address, mask=row >= 0, other=0)
    return row, address


@triton.jit
def _has_marks(p_edits, is_edited):
    has_penalties = tl.load(p_edits + HAS_PENALTIES, mask=is_edited, other=0)
    return (has_penalties | tl.load(p_edits + NUM_BIASES, mask=is_edited, other=0)) != 0


@triton.jit
def _clear_marks(p_row, p_address, p_mark, stride_address, vocab_size, BLOCK: tl.constexpr):
    i_position = tl.program_id(0).to(tl.int64)
    _, address = _edits_of(p_row, p_address, stride_address, i_position)
    if _has_marks(address.to(tl.pointer_type(tl.int32)), address != 0):
        o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        p_marks = p_mark + i_position * vocab_size + o_v
        tl.store(p_marks, tl.zeros((BLOCK,), tl.int32), mask=o_v < vocab_size)


@triton.jit
def _mark(
    p_row,
    p_position,
    p_table,
    p_address,
    p_mark,
    stride_table,
    stride_address,
    vocab_size,
    COUNTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts in the marks each output before a position, and adds the number of each token's bias,
    from 1 on."""
    i_position = tl.program_id(0).to(tl.int64)
    i_counter = tl.program_id(1)
    row, address = _edits_of(p_row, p_address, stride_address, i_position)
    if address != 0:
        p_edits = address.to(tl.pointer_type(tl.int32))
        p_marks = p_mark + i_position * vocab_size
        o_l = i_counter * BLOCK + tl.arange(0, BLOCK)
        if tl.load(p_edits + HAS_PENALTIES) != 0:
            first = tl.load(p_edits + NUM_PROMPT)
            count = tl.load(p_position + i_position) + 1 - first
            p_output = p_table + row * stride_table + first
            for i in range(0, count, COUNTERS * BLOCK):
                inside = i + o_l < count
                b_token = tl.load(p_output + i + o_l, mask=inside, other=0)
                tl.atomic_add(
                    p_marks + b_token, tl.full((BLOCK,), 1, tl.int32), mask=inside, sem="relaxed"
                )
        num_biases = tl.load(p_edits + NUM_BIASES)
        p_id = p_edits + tl.load(p_edits + BIASES)
        for i in range(0, num_biases, COUNTERS * BLOCK):
            inside = i + o_l < num_biases
            b_token = tl.load(p_id + i + o_l, mask=inside, other=0)
            tl.atomic_add(p_marks + b_token, (i + o_l + 1) << SLOT, mask=inside, sem="relaxed")


@triton.jit
def _is_in(p_set, o_v, inside):
    return ((tl.load(p_set + o_v // 32, mask=inside, other=0) >> (o_v % 32)) & 1) != 0


@triton.jit
def _edit(
    p_logit,
    p_row,
    p_address,
    p_mark,
    p_out,
    stride_logit,
    stride_address,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Applies all edits but those of `_forbid`: minus infinity stays unchanged under sums and
    products."""
    i_position = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_v < vocab_size
    b_x = tl.load(p_logit + i_position * stride_logit + o_v, mask=inside, other=0.0).to(tl.float32)
    _, address = _edits_of(p_row, p_address, stride_address, i_position)
    if address != 0:
        p_edits = address.to(tl.pointer_type(tl.int32))
        allowed = tl.load(p_edits + ALLOWED)
        if allowed != 0:
            b_x = tl.where(_is_in(p_edits + allowed, o_v, inside), b_x, float("-inf"))
        if _has_marks(p_edits, address != 0):
            b_mark = tl.load(p_mark + i_position * vocab_size + o_v, mask=inside, other=0)
            num_biases = tl.load(p_edits + NUM_BIASES)
            if num_biases != 0:
                b_slot = b_mark >> SLOT
                p_value = (p_edits + tl.load(p_edits + BIASES) + num_biases).to(
                    tl.pointer_type(tl.float32)
                )
                b_bias = tl.load(p_value + b_slot - 1, mask=b_slot > 0, other=0.0)
                b_x = tl.where(b_slot > 0, b_x + b_bias, b_x)
            if tl.load(p_edits + HAS_PENALTIES) != 0:
                b_count = b_mark & COUNT
                b_seen = b_count > 0
                in_prompt = tl.load(p_edits + IN_PROMPT)
                if in_prompt != 0:
                    b_seen = b_seen | _is_in(p_edits + in_prompt, o_v, inside)
                b_x = _penalized(
                    b_x, b_count, b_seen, (p_edits + REPETITION).to(tl.pointer_type(tl.float32))
                )
    tl.store(p_out + i_position * vocab_size + o_v, b_x, mask=inside)


@triton.jit
def _penalized(b_x, b_count, b_seen, p_strength):
    b_factor = tl.where(b_seen, tl.load(p_strength), 1.0)
    b_x = tl.where(b_x > 0, tl.div_rn(b_x, b_factor), b_x * b_factor)
    b_x -= tl.load(p_strength + 2) * b_count.to(tl.float32)
    return b_x - tl.load(p_strength + 1) * (b_count > 0).to(tl.float32)


@triton.jit
def _forbid(
    p_row,
    p_position,
    p_table,
    p_address,
    p_output,
    p_out,
    stride_table,
    stride_address,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Forbids ids that are blocked before the minimum length, and the last tokens of bad words that
    the outputs end in."""
    i_position = tl.program_id(0).to(tl.int64)
    row, address = _edits_of(p_row, p_address, stride_address, i_position)
    if address != 0:
        p_edits = address.to(tl.pointer_type(tl.int32))
        p_logits = p_out + i_position * vocab_size
        b_lowest = tl.full((BLOCK,), float("-inf"), tl.float32)
        if tl.load(p_output + i_position) < tl.load(p_edits + MIN_TOKENS):
            num_blocked = tl.load(p_edits + NUM_BLOCKED)
            p_id = p_edits + tl.load(p_edits + BLOCKED)
            for i in range(0, num_blocked, BLOCK):
                o_l = i + tl.arange(0, BLOCK)
                b_token = tl.load(p_id + o_l, mask=o_l < num_blocked, other=0)
                tl.store(p_logits + b_token, b_lowest, mask=o_l < num_blocked)
        last = tl.load(p_position + i_position)
        count = last + 1 - tl.load(p_edits + NUM_PROMPT)
        num_words = tl.load(p_edits + NUM_WORDS)
        longest = tl.load(p_edits + LONGEST_WORD)
        p_end = p_edits + tl.load(p_edits + WORDS)
        for i in range(0, num_words, BLOCK):
            o_w = i + tl.arange(0, BLOCK)
            inside = o_w < num_words
            b_end = tl.load(p_end + o_w, mask=inside, other=1)
            b_before = tl.load(p_end + num_words + o_w, mask=inside, other=1) - 1
            matches = inside & (b_before <= count)
            # Tokens are compared backwards, from the one before the word's last.
            num_compared = 0
            while (num_compared < longest - 1) & (
                tl.max((matches & (b_before > num_compared)).to(tl.int32)) > 0
            ):
                token = tl.load(
                    p_table + row * stride_table + last - num_compared,
                    mask=num_compared < count,
                    other=-1,
                )
                compared = matches & (b_before > num_compared)
                b_token = tl.load(p_edits + b_end - 2 - num_compared, mask=compared, other=0)
                matches = matches & ((b_before <= num_compared) | (b_token == token))
                num_compared += 1
            b_token = tl.load(p_edits + b_end - 1, mask=inside, other=0)
            tl.store(p_logits + b_token, b_lowest, mask=matches)
