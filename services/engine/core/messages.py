"""Messages between server and core, as they cross the ring."""

from __future__ import annotations

import msgspec

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.kv.peer_link import (
    HolderLeft,
    LeaseCopied,
    LeaseEnd,
    LeaseRequest,
    Lent,
    Placed,
    PullCopied,
    Pulled,
    PullEnd,
    PullRequest,
)
from headwater.engine_core.kv.prefetch import NewPrefetch
from headwater.engine_core.parallel.rank_facts import RankFigures
from headwater.engine_core.request import NewRequest
from headwater.engine_core.step_output import EngineLoad, MaskReport, StepOutput
from headwater.engine_core.system.ring import RingEnd


class Add(msgspec.Struct, tag="add", array_like=True):
    request: NewRequest


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    keys: list[int]
    keeps_answer: bool = False
    """Whether the next turn may go on from what was answered; False: the client left."""


class Credit(msgspec.Struct, tag="credit", array_like=True):
    """tokens[i] more for request keys[i]."""

    keys: list[int]
    tokens: list[int]


class Stall(msgspec.Struct, tag="stall", array_like=True):
    """Requests whose readers have taken nothing for a while."""

    keys: list[int]


class MasksFilled(msgspec.Struct, tag="masks", array_like=True):
    """Row rows[i] of the mask table holds masks of the request that got tickets[i], for
    num_masks[i] outputs from output_indices[i] on."""

    rows: list[int]
    tickets: list[int]
    output_indices: list[int]
    num_masks: list[int]


class Forced(msgspec.Struct, tag="forced", array_like=True):
    """The grammar of the request that got tickets[i] for rows[i] forces tokens forced_ids[i], and
    perhaps more, from output output_indices[i] on."""

    rows: list[int]
    tickets: list[int]
    output_indices: list[int]
    forced_ids: list[list[int]]


class Fail(msgspec.Struct, tag="fail", array_like=True):
    """Request keys[i] cannot go on, by errors[i]."""

    keys: list[int]
    errors: list[str]


class Probe(msgspec.Struct, tag="probe", array_like=True):
    """Choices that the server still has; those that the core does not have end."""

    keys: list[int]


class Prefetch(msgspec.Struct, tag="prefetch", array_like=True):
    prefetch: NewPrefetch


class EndPrefetch(msgspec.Struct, tag="end_prefetch", array_like=True):
    number: int


class BoundPrompts(msgspec.Struct, tag="bound_prompts", array_like=True):
    """A step computes prompts for about so long at most from now on; 0: as many tokens as its
    budget has."""

    seconds: float


class Sleep(msgspec.Struct, tag="sleep", array_like=True):
    """Fall asleep: give the device's memory back."""

    call: int
    """Number of the call, in the order of all such calls."""


class Wake(msgspec.Struct, tag="wake", array_like=True):
    """Wake, or do not fall asleep."""

    call: int


class BlocksPulled(msgspec.Struct, tag="pulled", array_like=True):
    message: Pulled


class BlocksPlaced(msgspec.Struct, tag="placed", array_like=True):
    message: Placed


class HolderGone(msgspec.Struct, tag="holder_gone", array_like=True):
    message: HolderLeft


class LendBlocks(msgspec.Struct, tag="lend", array_like=True):
    message: LeaseRequest


class EndLease(msgspec.Struct, tag="end_lease", array_like=True):
    message: LeaseEnd


class CopiedLease(msgspec.Struct, tag="copied_lease", array_like=True):
    message: LeaseCopied


class ReadAdapter(msgspec.Struct, tag="read_adapter", array_like=True):
    """Read an adapter from a folder and let requests have it."""

    number: int
    """Names the reading in its report."""
    folder: str
    within: str = ""
    """A folder that the adapter's has to lie in; empty: any."""


class DropAdapter(msgspec.Struct, tag="drop_adapter", array_like=True):
    """Forget an adapter when no request has it."""

    digest: bytes


class LoadWeights(msgspec.Struct, tag="load_weights", array_like=True):
    """Load the weights of a converted model's folder beside those that are computed with."""

    number: int
    """Names them from now on."""
    folder: str


class ReplaceWeights(msgspec.Struct, tag="replace_weights", array_like=True):
    """Compute with loaded weights from the next step on."""

    number: int
    ends_requests: bool


class DropWeights(msgspec.Struct, tag="drop_weights", array_like=True):
    """Forget loaded weights."""

    number: int


OfAdapters = ReadAdapter | DropAdapter
OfWeights = LoadWeights | ReplaceWeights | DropWeights
OfPrefetches = Prefetch | EndPrefetch
FromPeers = BlocksPulled | BlocksPlaced | HolderGone | LendBlocks | CopiedLease | EndLease
OfMasks = MasksFilled | Forced | Fail
OfRequests = Add | Cancel | Credit | Stall | Probe
OfSleep = Sleep | Wake
OfEngine = OfMasks | OfRequests | OfPrefetches | FromPeers | BoundPrompts | OfSleep
Command = OfEngine | OfAdapters | OfWeights


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """How far the start has come."""

    phase: str
    done: int
    total: int
    at: float
    """Time of the report on `time.time()`; the server may read it later."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The core takes requests: what it serves, and its first load report."""

    dtype: str
    kv_format: str
    vocab_size: int
    numerics_id: str
    block_size: int
    load: EngineLoad
    max_model_len: int
    max_num_seqs: int
    num_rows: int
    """Rows of the request table, and of the mask table."""
    longest_step: float
    """Predicted seconds of a step of the whole budget; 0: there is no prediction."""
    refused_fields: tuple[tuple[str, str], ...] = ()
    """Fields that requests may not have, each with the reason."""
    drafters: tuple[str, ...] = ()
    """Drafters that requests may ask for."""
    max_draft_tokens: int = 0
    """Drafted tokens of a request in a step at most; the mask table has a place for each."""
    max_chunk_tokens: int = 0
    """The most tokens of a prompt that one step computes."""
    num_peer_rows: int = 0
    """Rows of the memory through which blocks go from and to other engines; 0: none do."""
    peer_row_bytes: int = 0
    blocks_seen: tuple[int, ...] = ()
    """See `EngineConfig.blocks_seen`."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The core cannot start, and why."""

    reason: str


class Step(msgspec.Struct, tag="step", array_like=True):
    """Output of a step, and its cost."""

    output: StepOutput
    prefill_tokens: int
    decode_rows: int
    seconds: float
    """Seconds since the step before, or since the launch if the core was idle."""
    load: EngineLoad | None = None
    """Load after the step; None: it is about the one that was reported last."""

    @property
    def is_routine(self) -> bool:
        """Whether it computed no prompts and no request started or ended: answers only got
        longer."""
        return not (self.prefill_tokens or self.output.starts or self.output.finishes)


class Idle(msgspec.Struct, tag="idle", array_like=True):
    """The core has no work until the next command: no request runs, or all wait for credit."""

    load: EngineLoad
    num_commands: int
    """Number of commands that the core has read; later ones may be on their way."""


class Waiting(msgspec.Struct, tag="waiting", array_like=True):
    """The core has work that waits for blocks on their way, and nothing else to do. Reported now
    and then meanwhile."""

    load: EngineLoad


class Prepared(msgspec.Struct, tag="prepared", array_like=True):
    """Later steps find everything ready that can be made ready."""


class Ranks(msgspec.Struct, tag="ranks", array_like=True):
    """Figures of each rank so far."""

    figures: list[RankFigures]


class Experts(msgspec.Struct, tag="experts", array_like=True):
    """Figures of the model's experts so far."""

    figures: ExpertFigures


class AdapterRead(msgspec.Struct, tag="adapter_read", array_like=True):
    """An adapter was read, or is refused."""

    number: int
    digest: bytes = b""
    """Hash of its content."""
    rank: int = 0
    num_bytes: int = 0
    """Bytes of host memory."""
    error: str = ""
    """Why it is refused; empty: requests may have it."""


class AdapterDropped(msgspec.Struct, tag="adapter_dropped", array_like=True):
    """Reports that no request may have the adapter any more."""

    digest: bytes


class WeightsLoaded(msgspec.Struct, tag="weights_loaded", array_like=True):
    """Weights were loaded, or are refused."""

    number: int
    numerics_id: str = ""
    """Id of what is computed with them."""
    error: str = ""


class WeightsReplaced(msgspec.Struct, tag="weights_replaced", array_like=True):
    """Steps are computed with the weights, or cannot be."""

    number: int
    seconds: float = 0.0
    """Seconds in which no step was computed."""
    error: str = ""


class PullBlocks(msgspec.Struct, tag="pull", array_like=True):
    message: PullRequest


class EndPull(msgspec.Struct, tag="end_pull", array_like=True):
    message: PullEnd


class CopiedPull(msgspec.Struct, tag="copied_pull", array_like=True):
    message: PullCopied


class BlocksLent(msgspec.Struct, tag="lent", array_like=True):
    message: Lent


ToPeers = PullBlocks | EndPull | CopiedPull | BlocksLent
OfAdapterReports = AdapterRead | AdapterDropped
OfWeightsReports = WeightsLoaded | WeightsReplaced
OfOthers = OfAdapterReports | OfWeightsReports | ToPeers
"""Reports that go to other objects of the server than its sessions."""
OfSteps = Step | Idle | Waiting
OfFigures = Ranks | Experts
OfStart = Progress | Ready | Failed | Prepared
Report = OfStart | OfSteps | OfFigures | OfOthers


class Ends(msgspec.Struct):
    """Descriptors that the core inherits; its first argument, as JSON."""

    commands: RingEnd
    reports: RingEnd
    mask_reports: RingEnd
    """Ring of the reports that the thread which fills masks waits for."""
    masks: int
    """Memory of the mask table."""
    records: int
    """Memory through which blocks go from and to other engines."""
    block_keys: int
    """Pipe from which the keys are read that seal records of blocks."""
    lifeline: int
    """Reaches end of file when the server is gone."""
    weights_holder: int = -1
    """Socket to the process that holds weights; -1: there is none."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        rings = *self.commands, *self.reports, *self.mask_reports
        others = self.masks, self.records, self.block_keys, self.lifeline
        holder = (self.weights_holder,) if self.weights_holder >= 0 else ()
        return *rings, *others, *holder


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_mask_report = msgspec.msgpack.Decoder(MaskReport).decode
