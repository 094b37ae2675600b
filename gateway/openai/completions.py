"""POST /v1/completions: prompts to generation requests, and their answers to OpenAI's completion
JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.slices import slices

from ..request.choice import Choice
from ..request.choice_count import check_num_choices
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest, score_echo
from ..request.prepare import for_each_prompt
from ..request.prepared_prompt import PreparedPrompt
from ..request.sinks import Piece
from ..stages.output_session import Scores
from ..tenancy.caller import Caller
from .logprobs import TextCounter, completion_logprobs, prompt_logprobs
from .schema import CompletionRequest
from .structured_output import put_structured_output
from .to_pb import check_stream_options, sampling_to_pb

ALLOWED_PROMPT = (
    "a string, a list of strings, token ids, or a list of lists of token ids, none empty"
)


class CompletionRenderer:
    """Renders texts, with the prompt before them on echo."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, asked: CompletionRequest) -> None:
        self._asked = asked
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._echoes: dict[PreparedPrompt, tuple[str, list[common_pb2.TokenLogprob]]] = {}
        """Text of each prompt with its tokens' log probabilities; the first token has none."""
        self._counters: dict[Choice, TextCounter] = {}
        """Counters of the characters of each choice whose log probabilities were sent."""
        self.scores_prompt = bool(asked.echo) and asked.logprobs is not None
        self.renamed = {"top_logprobs": "logprobs"}

    def generation_requests(self, caller: Caller, max_choices: int) -> list[GenerationRequest]:
        """One generation request a prompt; choice i of prompt p has the index p·n + i. Raises
        `BadRequest`."""
        asked = self._asked
        check_stream_options(asked.stream, asked.stream_options)
        sampling = sampling_to_pb(asked)
        if asked.logprobs is not None:
            sampling.logprobs = True
            sampling.top_logprobs = asked.logprobs
        self.renamed |= put_structured_output(asked, sampling)
        sampling.echo = bool(asked.echo)
        _check_suffix(asked)
        stream = score_echo(sampling, stream=bool(asked.stream))
        stride = asked.n or 1
        check = partial(check_num_choices, "prompt", sampling=sampling, allowed=max_choices)
        prompts = prompts_of(
            "prompt",
            asked.prompt,
            check,
            add_special_tokens=asked.add_special_tokens,
            may_be_empty=bool(asked.suffix),
        )
        if asked.suffix:
            for prompt in prompts:
                prompt.suffix = asked.suffix
        return [
            GenerationRequest(
                caller=caller,
                model=asked.model,
                prompt=prompt,
                sampling=sampling,
                stream=stream,
                endpoint="completions",
                cache_salt=asked.cache_salt or "",
                first_index=position * stride,
            )
            for position, prompt in enumerate(prompts)
        ]

    async def prepared(self, cluster: Cluster, generations: Sequence[Generation]) -> None:
        """Finds the texts of prompts that are to be echoed."""
        if self._asked.echo:
            await for_each_prompt(cluster, generations, partial(self._echo, cluster))

    async def _echo(self, cluster: Cluster, generation: Generation) -> None:
        prompt = generation.request.prompt
        first = []
        if self._asked.logprobs is not None:
            first_id = generation.prepared.prompt_ids[0]
            spelled = await _text_of(cluster, generation, [first_id])
            chosen = common_pb2.TopLogprob(
                token_id=first_id, token=spelled, token_bytes=spelled.encode()
            )
            first = [common_pb2.TokenLogprob(chosen=chosen)]
        text = prompt.text
        if prompt.WhichOneof("kind") != "text" or self._asked.truncate_prompt_tokens is not None:
            text = await _text_of(cluster, generation, generation.prepared.prompt_ids)
        self._echoes[generation.prompt] = text, first

    def first_fields(self, choice: Choice) -> dict[str, Any] | None:
        fields = self._prompt_fields(choice)
        if self._asked.echo:
            return {
                "text": self._echoes[choice.prompt][0],
                "logprobs": self.logprobs(choice, ()),
                **fields,
            }
        return {"text": "", **fields} if fields else None

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta_of(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text} if piece.text else {}

    def ending(self) -> dict[str, Any]:
        return {"text": ""}

    def finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        text = piece.text
        fields = self._prompt_fields(choice)
        if self._asked.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt.logprobs)
        return {
            "text": self._echoes[choice.prompt][0] + text if self._asked.echo else text,
            **fields,
        }

    def beside(self, prompt: PreparedPrompt) -> dict[str, Any]:
        return {}

    def logprobs(self, choice: Choice, tokens: Scores) -> dict[str, Any] | None:
        """Log probabilities of the next tokens of a choice; the first time with the prompt's before
        them, on echo."""
        if self._asked.logprobs is None:
            return None
        counter = self._counters.get(choice)
        if counter is not None:
            return completion_logprobs(tokens, counter.offsets(tokens), as_ids=self._as_ids)
        counter = self._counters[choice] = TextCounter()
        text, first = self._echoes[choice.prompt] if self._asked.echo else ("", [])
        echoed = [*first, *choice.prompt.logprobs] if self._asked.echo else []
        offsets = counter.prompt_offsets(echoed, text) + counter.offsets(tokens)
        columns = completion_logprobs([*echoed, *tokens], offsets, as_ids=self._as_ids)
        if echoed:
            columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        return columns

    def _prompt_fields(self, choice: Choice) -> dict[str, Any]:
        if not self._asked.return_token_ids:
            return {}
        return {"prompt_token_ids": list(choice.prompt.prepared.prompt_ids)}


def _check_suffix(asked: CompletionRequest) -> None:
    """Raises `BadRequest` for an echo of a text with a gap: what would be the prompt of the answer
    is two texts and marks."""
    if asked.suffix and asked.echo:
        raise BadRequest("suffix", "suffix together with echo; allowed: one of them")


def prompts_of(
    name: str,
    given: str | Sequence[Any],
    check: Callable[[int], None],
    *,
    add_special_tokens: bool | None,
    may_be_empty: bool = False,
) -> list[processor_pb2.Prompt]:
    """Prompts in each of the forms that clients send, distinguished by the contents of the list;
    `check` gets their number. Raises `BadRequest`, naming `name`; of an empty text too, unless it
    stands before a gap (`may_be_empty`)."""
    prompts: Sequence[Any] = [given] if isinstance(given, str) else given
    kinds = {type(item) for item in prompts}
    if kinds == {int}:
        prompts = [prompts]
        kinds = {list}
    check(len(prompts))
    if len(kinds) != 1 or not (all(prompts) or (may_be_empty and kinds == {str})):
        raise BadRequest.of(name, given, ALLOWED_PROMPT)
    if kinds == {str}:
        return [
            processor_pb2.Prompt(text=text, add_special_tokens=add_special_tokens)
            for text in prompts
        ]
    if any(set(map(type, ids)) != {int} for ids in prompts):
        raise BadRequest.of(name, given, ALLOWED_PROMPT)
    return [_prompt_of_ids(ids) for ids in prompts]


def _prompt_of_ids(ids: Sequence[int]) -> processor_pb2.Prompt:
    prompt = processor_pb2.Prompt()
    for part in slices(ids):
        prompt.token_ids.ids.extend(part)
    return prompt


async def _text_of(cluster: Cluster, generation: Generation, token_ids: Sequence[int]) -> str:
    asked = generation.request
    request = processor_pb2.ProcessorDetokenizeRequest(
        model=asked.model, token_ids=token_ids, tenant=asked.caller.tenant.key
    )
    return (await cluster.stages.processors.detokenize(request)).text
