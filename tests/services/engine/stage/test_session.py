"""What a session decides by itself; the rest is tested through the service."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.request import FinishReason, NewRequest, Speculation
from headwater.engine_core.step_output import Finished, StepOutput, Work
from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import LOSS_CAUSE_MISSING, LOSS_CAUSE_SUPERSEDED, Speculative
from headwater.services.engine.core.figures import CoreFigures
from headwater.services.engine.core.messages import Add, Cancel, Command, Credit, Probe, Stall
from headwater.services.engine.stage.requests import Limits
from headwater.services.engine.stage.session import EngineSession
from headwater.services.runtime.session.attempt_fence import AttemptFence
from headwater.services.runtime.tracing import NO_TRACING, NoSpan, NoTracing, Tracing
from tests.services.engine.engine_process import add


class Recorder:
    """A host that keeps what it is told."""

    def __init__(self) -> None:
        self.limits = Limits(vocab_size=1000, max_model_len=100)
        self.tracing: Tracing = NO_TRACING
        self.keys: Iterator[int] = itertools.count(1)
        self.commands: list[Command] = []
        self.fence = AttemptFence()
        self.core_figures = CoreFigures()

    def check_open(self) -> None:
        pass

    def enter(self, request: NewRequest, grammar: bytes) -> None:
        self.send(Add(request))

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def session_changed(self) -> None:
        pass


def tokens(key: int, first_index: int, count: int) -> StepOutput:
    return StepOutput(
        step=1,
        keys=[key],
        first_index=[first_index],
        num_tokens=[count],
        token_ids=list(range(count)),
    )


def left_to_send(session: EngineSession) -> list[pb.EngineFrame]:
    return list(iter(session._outbox.next_frame, None))


async def test_a_stream_without_credit_for_thirty_seconds_is_cancelled() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3], credit=4), add(2, [1, 2, 3], credit=5)]))
    session.deliver(tokens(1, 0, 4))
    session.deliver(tokens(2, 0, 4))
    for now in range(100, 130):
        session.cancel_starved(now)
    assert Cancel([1]) not in host.commands
    session.cancel_starved(130)
    session.cancel_starved(131)
    assert host.commands[2:] == [Stall([1]), Cancel([1])]
    session.deliver(
        StepOutput(
            step=2, finishes=[Finished(key=1, reason=FinishReason.CANCELLED, num_output_tokens=4)]
        )
    )
    session.end()
    *_, last = left_to_send(session)
    assert (last.finishes[0].stream_id, last.finishes[0].error) == (1, "slow_reader")


async def test_the_core_learns_once_of_a_stream_that_stands_still_for_a_second() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3], credit=4), add(2, [1, 2, 3], credit=5)]))
    session.deliver(tokens(1, 0, 4))
    session.deliver(tokens(2, 0, 4))
    for now in (100, 101, 102, 103):
        session.cancel_starved(now)
    assert host.commands[2:] == [Stall([1])]
    session.take(pb.ClientFrame(credits=[pb.Credit(stream_id=1, tokens=2)]))
    session.cancel_starved(104)
    session.deliver(tokens(1, 4, 2))
    for now in (105, 106, 107):
        session.cancel_starved(now)
    assert host.commands[3:] == [Credit([1], [2]), Stall([1])]


async def test_a_reader_that_takes_a_little_at_a_time_is_none_that_takes_nothing() -> None:
    """What it grants is used up before anybody looks."""
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3], credit=4)]))
    session.deliver(tokens(1, 0, 4))
    for i in range(30):
        session.cancel_starved(100 + 3 * i)
        session.cancel_starved(102 + 3 * i)
        session.take(pb.ClientFrame(credits=[pb.Credit(stream_id=1, tokens=1)]))
        session.deliver(tokens(1, 4 + i, 1))
    assert host.commands[1:] == [
        command for _ in range(30) for command in (Stall([1]), Credit([1], [1]))
    ]


class Spans(NoTracing):
    """Of which streams spans began, and with which errors they ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def begin(self, name: str, traceparent: str, tracestate: str = "", **attributes: Any) -> Any:
        ended = self.ended

        class Span(NoSpan):
            def end(self, error: str = "", **attributes: Any) -> None:
                ended.append(error)

        return Span()


async def test_a_stream_that_the_core_never_computed_leaves_a_span_too() -> None:
    host = Recorder()
    host.tracing = spans = Spans()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3])]))
    session.deliver(
        StepOutput(
            step=0,
            finishes=[
                Finished(key=1, reason=FinishReason.ERROR, num_output_tokens=0, error="no mask")
            ],
        )
    )
    assert spans.ended == ["no mask"]


async def test_a_stream_id_whose_request_is_still_coming_may_not_be_used_again() -> None:
    session = EngineSession(Recorder())
    half = add(1, [1, 2, 3])
    del half.prompt_ids[2:]
    session.take(pb.ClientFrame(adds=[half]))
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3]), add(2, [1, 2, 3])]))
    assert session.num_streams == 1


async def test_credit_in_time_saves_a_stream() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3], credit=4)]))
    session.deliver(tokens(1, 0, 4))
    session.cancel_starved(100)
    session.take(pb.ClientFrame(credits=[pb.Credit(stream_id=1, tokens=2)]))
    session.cancel_starved(131)
    session.deliver(tokens(1, 4, 2))
    session.cancel_starved(132)
    session.cancel_starved(161)
    assert host.commands[1:] == [Credit([1], [2]), Stall([1])]


async def test_a_cancel_that_comes_with_its_own_add_still_cancels() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(
        pb.ClientFrame(
            adds=[add(1, [1, 2, 3])], cancels=[pb.Cancel(stream_id=1, reason="client_gone")]
        )
    )
    assert host.commands[1:] == [Cancel([1])]


@pytest.mark.parametrize(
    ("reason", "keeps_answer"),
    [
        *[("stop_string", True), ("attempt_lost", True), ("prefilled", True)],
        *[("client_gone", False), ("slow_reader", False), ("", False)],
    ],
)
async def test_the_core_learns_whether_anyone_wants_the_answer_of_a_cancelled_stream(
    reason: str, keeps_answer: bool
) -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3])]))
    session.take(pb.ClientFrame(cancels=[pb.Cancel(stream_id=1, reason=reason)]))
    assert host.commands[1:] == [Cancel([1], keeps_answer)]


async def test_only_the_first_choice_scores_the_prompt() -> None:
    host = Recorder()
    session = EngineSession(host)
    request = add(1, [1, 2, 3], stream_ids=[1, 2, 3], choice_indices=[4, 5, 6])
    request.sampling.prompt_logprobs = 2
    session.take(pb.ClientFrame(adds=[request]))
    requests = [command.request for command in host.commands if isinstance(command, Add)]
    assert [request.choice_index for request in requests] == [4, 5, 6]
    assert [request.sampling.num_prompt_logprobs for request in requests] == [2, None, None]


async def test_an_engine_whose_platform_scores_no_prompts_refuses_to_by_name() -> None:
    host = Recorder()
    refused = (("prompt_logprobs", "the platform of this engine lacks it"),)
    host.limits = Limits(vocab_size=1000, max_model_len=100, refused_fields=refused)
    session = EngineSession(host)
    request = add(1, [1, 2, 3])
    request.sampling.prompt_logprobs = 2
    session.take(pb.ClientFrame(adds=[request, add(2, [1, 2, 3])]))
    assert [
        command.request.prompt_ids for command in host.commands if isinstance(command, Add)
    ] == [[1, 2, 3]]
    session.end()
    (finish,) = [each for frame in left_to_send(session) for each in frame.finishes]
    assert "prompt_logprobs is not supported: the platform of this engine lacks it" in str(finish)


async def test_a_request_says_whether_and_how_its_tokens_may_be_drafted() -> None:
    host = Recorder()
    host.limits = Limits(vocab_size=1000, max_model_len=100, drafters=("ngram",))
    session = EngineSession(host)
    asked = [
        (None, Speculation()),
        (Speculative(), Speculation()),
        (Speculative(mode="auto", max_tokens=4), Speculation(max_tokens=4)),
        (Speculative(mode="off"), Speculation(is_on=False)),
        (Speculative(drafter="ngram", max_tokens=31), Speculation(drafter="ngram", max_tokens=31)),
        # Which this engine lacks.
        (Speculative(drafter="suffix"), Speculation(is_on=False, drafter="suffix")),
    ]
    for stream_id, (speculative, _) in enumerate(asked):
        request = add(
            2 * stream_id,
            [1, 2, 3],
            stream_ids=[2 * stream_id, 2 * stream_id + 1],
            choice_indices=[0, 1],
        )
        if speculative is not None:
            request.sampling.speculative.CopyFrom(speculative)
        session.take(pb.ClientFrame(adds=[request]))
    received = [
        command.request.speculation for command in host.commands if isinstance(command, Add)
    ]
    assert received == [each for _, each in asked for _ in range(2)]


async def test_the_end_of_a_stream_says_what_was_drafted_and_answered_here() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(
        pb.ClientFrame(adds=[add(1, [1, 2, 3], 16, output_ids=[4, 5, 6], num_output_tokens=3)])
    )
    work = Work(
        num_preemptions=0,
        num_steps=4,
        mean_batch=1.0,
        num_draft_tokens=9,
        num_accepted_tokens=6,
        kv_bytes={"full": 64},
    )
    end = Finished(key=1, reason=FinishReason.LENGTH, num_output_tokens=16, work=work)
    session.deliver(StepOutput(step=9, finishes=[end]))
    session.end()
    (finish,) = [each for frame in left_to_send(session) for each in frame.finishes]
    reported = finish.work
    assert dict(reported.kv_bytes) == {"full": 64}
    assert not reported.HasField("experts")
    assert (
        reported.steps,
        reported.draft_tokens,
        reported.accepted_tokens,
        reported.output_tokens,
    ) == (
        4,
        9,
        6,
        13,
    )


async def test_the_end_of_a_stream_has_the_newest_figures_of_experts() -> None:
    host = Recorder()
    host.core_figures.experts = ExpertFigures(
        num_rows=[3, 5], largest_shares=[0.5, 0.75], num_read=4, num_bytes_read=800
    )
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[add(1, [1, 2, 3], 16)]))
    work = Work(
        num_preemptions=0, num_steps=4, mean_batch=1.0, num_draft_tokens=0, num_accepted_tokens=0
    )
    end = Finished(key=1, reason=FinishReason.LENGTH, num_output_tokens=16, work=work)
    session.deliver(StepOutput(step=9, finishes=[end]))
    session.end()
    (finish,) = [each for frame in left_to_send(session) for each in frame.finishes]
    found = finish.work.experts
    assert (found.largest_share, found.step_experts, found.step_bytes) == (0.75, 4, 800)


async def test_ends_of_sequence_stop_unless_ignored_and_wait_for_min_tokens() -> None:
    host = Recorder()
    session = EngineSession(host)
    for stream_id, ignore_eos, min_tokens in ((1, False, 0), (2, True, 0), (3, False, 2)):
        request = add(stream_id, [1, 2, 3], eos_token_ids=[7])
        request.sampling.stop_token_ids.append(8)
        request.sampling.ignore_eos = ignore_eos
        request.sampling.min_tokens = min_tokens
        session.take(pb.ClientFrame(adds=[request]))
    sampling = [command.request.sampling for command in host.commands if isinstance(command, Add)]
    assert [each.stop_token_ids for each in sampling] == [(7, 8), (8,), (7, 8)]
    assert [each.min_tokens_blocked_ids for each in sampling] == [(), (), (7, 8)]


async def test_a_later_attempt_ends_earlier_ones_of_its_prompt_and_no_earlier_one_comes_after_it() -> (
    None
):
    host = Recorder()
    sessions = [EngineSession(host), EngineSession(host)]
    for stream_id, prompt_index, attempt in ((1, 0, 1), (2, 0, 1), (3, 1, 1)):
        of = {"request_id": "r", "prompt_index": prompt_index, "attempt": attempt}
        sessions[0].take(pb.ClientFrame(adds=[add(stream_id, [1, 2, 3], **of)]))
    sessions[1].take(pb.ClientFrame(adds=[add(1, [1, 2, 3], request_id="r", attempt=2)]))
    assert host.commands[3:-1] == [Cancel([1], True), Cancel([2], True)]
    sessions[0].take(pb.ClientFrame(adds=[add(4, [1, 2, 3], request_id="r", attempt=1)]))
    assert len(host.commands) == 6
    finishes = [
        Finished(key=key, reason=FinishReason.CANCELLED, num_output_tokens=0)
        for key in (1, 2, 3, 4)
    ]
    for session in sessions:
        session.deliver(StepOutput(step=2, finishes=finishes))
        session.end()
    output = [finish for frame in left_to_send(sessions[0]) for finish in frame.finishes]
    superseded = {finish.stream_id for finish in output if finish.cause == LOSS_CAUSE_SUPERSEDED}
    assert superseded == {1, 2, 4}
    # Whoever comes when all have ended is nobody's rival.
    sessions[1].take(pb.ClientFrame(adds=[add(9, [1, 2, 3], request_id="r", attempt=1)]))
    assert isinstance(host.commands[-1], Add)


async def test_streams_that_are_asked_for_end_where_they_are_not_here() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(
        pb.ClientFrame(adds=[add(1, [1, 2, 3]), add(2, [1], num_prompt_tokens=2)], probed=[1, 2, 3])
    )
    # One is the core's to speak of, of the other a part is still to come.
    assert host.commands[1:] == [Probe([1])]
    session.deliver(
        StepOutput(
            step=2, finishes=[Finished(key=1, reason=FinishReason.MISSING, num_output_tokens=0)]
        )
    )
    session.end()
    output = [finish for frame in left_to_send(session) for finish in frame.finishes]
    assert [(each.stream_id, each.retriable, each.cause) for each in output] == [
        (3, True, LOSS_CAUSE_MISSING),
        (1, True, LOSS_CAUSE_MISSING),
    ]


async def test_an_engine_that_leaves_hands_over_what_is_long_and_keeps_what_is_short() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(
        pb.ClientFrame(
            adds=[
                add(1, [1], 90),
                add(2, [2], 20),
                add(3, [3], 90),
                add(4, [4], num_prompt_tokens=2),
            ]
        )
    )
    session.deliver(tokens(3, 0, 80))
    assert session.hand_over(50) == 2
    assert host.commands[3:] == [Cancel([1], True)]
    assert session.hand_over(0) == 2
    assert host.commands[4:] == [Cancel([2], True), Cancel([3], True)]
    assert session.hand_over(0) == 0


def half_of(*stream_ids: int, **fields: Any) -> pb.Add:
    """A request of several choices of whose prompt one token is still to come."""
    return add(stream_ids[0], [1, 2], stream_ids=stream_ids, num_prompt_tokens=3, **fields)


def rest_of(stream_id: int) -> pb.ClientFrame:
    return pb.ClientFrame(parts=[pb.AddPart(stream_id=stream_id, prompt_ids=[3])])


async def test_no_choice_is_missing_while_parts_of_its_request_are_still_coming() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[half_of(1, 2, 3)], probed=[1, 2, 3, 4]))
    finishes = [finish for frame in left_to_send(session) for finish in frame.finishes]
    assert [(finish.stream_id, finish.cause) for finish in finishes] == [(4, LOSS_CAUSE_MISSING)]
    session.take(rest_of(1))
    assert [type(command) for command in host.commands] == [Add, Add, Add]


async def test_a_choice_that_is_cancelled_while_parts_are_still_coming_ends_alone() -> None:
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[half_of(1, 2, 3)]))
    session.take(pb.ClientFrame(cancels=[pb.Cancel(stream_id=1), pb.Cancel(stream_id=3)]))
    session.take(rest_of(1))
    assert [command.request.key for command in host.commands if isinstance(command, Add)] == [
        1,
        2,
        3,
    ]
    assert host.commands[3:] == [Cancel([1]), Cancel([3])]


async def test_a_request_all_of_whose_choices_are_cancelled_while_parts_are_still_coming_never_begins() -> (
    None
):
    host = Recorder()
    session = EngineSession(host)
    session.take(pb.ClientFrame(adds=[half_of(1, 2)]))
    session.take(
        pb.ClientFrame(cancels=[pb.Cancel(stream_id=2, reason="enough"), pb.Cancel(stream_id=1)])
    )
    assert session.is_idle
    session.take(rest_of(1))
    assert host.commands == []
    [frame] = left_to_send(session)
    assert [finish.stream_id for finish in frame.finishes] == [1, 2]


async def test_an_attempt_whose_parts_come_after_a_later_one_has_begun_never_begins() -> None:
    host = Recorder()
    earlier = EngineSession(host)
    later = EngineSession(host)
    earlier.take(pb.ClientFrame(adds=[half_of(1, 2, request_id="r", attempt=1)]))
    later.take(pb.ClientFrame(adds=[add(1, [1, 2, 3], request_id="r", attempt=2)]))
    earlier.take(rest_of(1))
    assert [type(command) for command in host.commands] == [Add]
    [frame] = left_to_send(earlier)
    assert [(each.stream_id, each.cause) for each in frame.finishes] == [
        (1, LOSS_CAUSE_SUPERSEDED),
        (2, LOSS_CAUSE_SUPERSEDED),
    ]
    assert earlier.is_idle
