"""Draft heads on a CPU: they draft what their published definition drafts, and answers stay what
they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.bench.forced_answers import ForcedAnswers
from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.drafter.computed_positions import CATCH_UP
from headwater.engine_core.executors.drafter.eager_drafter import EagerDrafter
from headwater.engine_core.executors.entry.eager_entry import EagerStep
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.heads.checkpoint import HeadsFile
from headwater.engine_core.heads.registry import load_heads, read_heads
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.heads_twin import HeadsTwin
from tests.engine_core.oracle_speculator import SAMPLINGS, answers_of_a_new_engine
from tests.engine_core.published_heads import (
    CONFIGS,
    LAYER,
    NUM_DRAFT_TOKENS,
    Tensors,
    publish,
    random_heads,
)
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_draft_model import (
    LONG,
    MAX_DRAFTS,
    PROMPTS,
    SHORT_LENGTHS,
    PausingSpeculator,
    WholeDrafts,
)
from tests.long_values import long_but

SMALL = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "max_model_len": 256}
KINDS = ("medusa", "eagle", "eagle3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return random_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoint") / "hf")


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    model.save_pretrained(path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def engines(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SmallEngine]]:
    """One with heads of each kind, random ones, and for each kind one whose heads are broken: their
    logits are NaN."""
    path = tmp_path_factory.mktemp("heads")
    opened = dict[str, SmallEngine]()
    for kind in KINDS:
        for state in ("random", "broken"):
            tensors = random_heads(kind)
            if state == "broken":
                tensors = {
                    name: t * torch.nan if t.is_floating_point() else t
                    for name, t in tensors.items()
                }
            heads = publish(path / f"{kind}-{state}", CONFIGS[kind], tensors)
            opened[f"{state} {kind}"] = SmallEngine(
                folder, **SMALL, draft_heads=heads, max_draft_tokens=MAX_DRAFTS
            )
    yield opened
    for engine in opened.values():
        engine.close()


class Recorder:
    """Stands before the drafter of an executor and notes what it drafts behind which tokens."""

    def __init__(self, executor: StepExecutor[Any, Any]) -> None:
        self._drafter: EagerDrafter = executor._drafter
        self._tokens = executor._entry._table.token_ids
        self.noted: list[tuple[list[int], list[int]]] = []
        executor._drafter = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, sent: EagerStep) -> None:
        self._drafter.draft(sent)
        columns = sent.plan.rows.tolist(), sent.ends.tolist(), sent.num_drafted.tolist()
        for row, end, count in zip(*columns, strict=True):
            tokens = self._tokens[row, : end + count].tolist()
            if count:
                self.noted.append((tokens[:end], tokens[end:]))


def half_right(twin: HeadsTwin, prompt: Sequence[int], length: int) -> list[int]:
    """An answer that begins with a token of the prompt, then takes drafts and others in turn:
    none, all, one, …"""
    answer = [prompt[0]]
    rng = np.random.default_rng(5)
    while len(answer) < length:
        drafts = twin.drafts([*prompt, *answer], MAX_DRAFTS)
        right = drafts[: int(rng.integers(0, MAX_DRAFTS + 1))]
        behind = drafts[len(right)] if len(right) < MAX_DRAFTS else 0
        answer += [*right, (behind + 1) % 512]
    return answer[:length]


@pytest.mark.parametrize("kind", long_but(CONFIGS, "medusa", "eagle3"))
def test_drafts_are_those_of_a_twin_in_float64_behind_chunks_drafts_and_cached_prefixes(
    model: Any, folder: Path, tmp_path: Path, kind: str
) -> None:
    config = CONFIGS[kind]
    tensors = random_heads(kind)
    length = 25
    twin = HeadsTwin(model, config, tensors)
    forced = ForcedAnswers(64)
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[4]]
    answers = [half_right(twin, prompt, length) for prompt in prompts]
    forced.expect(dict(enumerate(answers, start=1)))
    heads = publish(tmp_path / "heads", config, tensors, pickled="of" in kind or "with" in kind)
    with forced.installed():
        small = SmallEngine(folder, **SMALL, draft_heads=heads, max_draft_tokens=MAX_DRAFTS)
    recorder = Recorder(small.executor)
    samplings = [greedy(length, seed=seed) for seed in (1, 2, 3)]
    reported, load = answers_of_a_new_engine(
        small, prompts, samplings, WholeDrafts().beside(small.config), num_rounds=2
    )
    small.close()
    assert [answer.token_ids for answer in reported] == answers * 2
    assert [answer.cached_tokens for answer in reported] == [0, 0, 0, 0, 16, 32]
    assert 0.3 * load.num_draft_tokens < load.num_accepted_tokens < 0.9 * load.num_draft_tokens
    assert len(recorder.noted) > 20
    for known, drafts in recorder.noted:
        assert drafts == twin.drafts(known, len(drafts)), (len(known), len(drafts))


@pytest.mark.parametrize("num_steps", [1, CATCH_UP + 3])
@pytest.mark.parametrize("kind", long_but(("eagle", "eagle3"), "eagle3"))
def test_pairs_that_were_not_read_while_nothing_was_drafted_are_caught_up(
    model: Any, folder: Path, tmp_path: Path, kind: str, num_steps: int
) -> None:
    config = CONFIGS[kind]
    tensors = random_heads(kind)
    heads = publish(tmp_path / "heads", config, tensors)
    twin = HeadsTwin(model, config, tensors)
    small = SmallEngine(folder, **SMALL, draft_heads=heads, max_draft_tokens=MAX_DRAFTS)
    recorder = Recorder(small.executor)
    speculator = PausingSpeculator(num_steps).beside(small.config)
    answers_of_a_new_engine(small, PROMPTS[:3], [greedy(num_steps + 8)], speculator)
    small.close()
    assert recorder.noted
    for known, drafts in recorder.noted:
        assert drafts == twin.drafts(known, len(drafts))


@pytest.mark.parametrize("way", ["one", pytest.param("both", marks=LONG)])
@pytest.mark.parametrize("kind", long_but(SAMPLINGS, "penalties"))
def test_answers_and_log_probabilities_are_those_without_heads(
    engines: dict[str, SmallEngine], kind: str, way: str
) -> None:
    """`way`: whether each engine's rows run ahead and wait, or do the one with these samplings and
    the other with the next."""
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n in SHORT_LENGTHS]
    plain, _ = answers_of_a_new_engine(engines["random eagle"], PROMPTS, samplings)
    for i, (name, small) in enumerate(engines.items()):
        turn = (i // 2 + i + list(SAMPLINGS).index(kind)) % 2 == 0
        for is_ahead in (turn,) if way == "one" else (False, True):
            speculator = WholeDrafts(is_ahead=is_ahead).beside(small.config)
            answers, load = answers_of_a_new_engine(small, PROMPTS, samplings, speculator)
            assert answers == plain, (name, is_ahead)
            assert load.num_draft_tokens > 0


@pytest.mark.long
def test_allowed_ids_that_heads_do_not_draft_among_change_no_token(
    engines: dict[str, SmallEngine],
) -> None:
    ids = random_heads("eagle3")["d2t"] + torch.arange(NUM_DRAFT_TOKENS)
    others = tuple(sorted(set(range(512)) - set(ids.tolist())))[:20]
    small = engines["random eagle3"]
    for temperature in (0.0, 0.02, 1.0):
        for more in ({}, {"top_p": 0.9, "top_k": 5}):
            sampling = SamplingParams(
                temperature=temperature, seed=3, max_tokens=30, allowed_token_ids=others, **more
            )
            plain, _ = answers_of_a_new_engine(small, PROMPTS[:2], [sampling])
            answers, load = answers_of_a_new_engine(
                small, PROMPTS[:2], [sampling], WholeDrafts().beside(small.config)
            )
            assert answers == plain
            assert load.num_draft_tokens > 0


@pytest.mark.parametrize("num_examples", [2, pytest.param(30, marks=LONG)])
def test_no_token_differs_whatever_requests_ask_and_whichever_is_preempted(
    engines: dict[str, SmallEngine], num_examples: int
) -> None:
    @settings(deadline=None, max_examples=num_examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_drawn_requests(engines, data)

    check()


def check_drawn_requests(engines: dict[str, SmallEngine], data: st.DataObject) -> None:
    small = engines[data.draw(st.sampled_from(sorted(engines)))]
    samplings = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
            seed=data.draw(st.integers(0, 3)),
            max_tokens=data.draw(st.integers(1, 40)),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            top_k=data.draw(st.sampled_from([0, 10])),
            num_logprobs=data.draw(st.sampled_from([None, 2])),
        )
        for _ in PROMPTS
    ]
    plain, _ = answers_of_a_new_engine(small, PROMPTS, samplings)
    speculator = WholeDrafts(is_ahead=data.draw(st.booleans())).beside(small.config)
    answers, _ = answers_of_a_new_engine(small, PROMPTS, samplings, speculator, num_rounds=2)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain] * 2
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in plain] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_requests_that_are_preempted_between_drafts_answer_the_same(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    heads = publish(tmp_path / "heads", CONFIGS[kind], random_heads(kind))
    few = {"num_blocks": 16, "max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    narrow = SmallEngine(folder, **few, draft_heads=heads, max_draft_tokens=MAX_DRAFTS)
    samplings = [SamplingParams(max_tokens=60, **SAMPLINGS["penalties"])]
    plain, _ = answers_of_a_new_engine(narrow, PROMPTS, samplings)
    crowded, load = answers_of_a_new_engine(
        narrow, PROMPTS, samplings, WholeDrafts().beside(narrow.config)
    )
    narrow.close()
    assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in plain]
    assert load.num_preemptions > 0
    assert load.num_draft_tokens > 50


def with_shape(kind: str, name: str, shape: tuple[int, ...]) -> Tensors:
    return random_heads(kind) | {name: torch.zeros(shape)}


def without(kind: str, name: str) -> Tensors:
    return {other: tensor for other, tensor in random_heads(kind).items() if other != name}


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "another width": (
        LAYER | {"hidden_size": 128},
        {},
        "hidden_size is 128; allowed: 64, as the served model",
    ),
    "another vocabulary": (
        LAYER | {"vocab_size": 640},
        {},
        "vocab_size is 640; allowed: 512, as the served model",
    ),
    "two layers": (LAYER | {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2; allowed: 1"),
    "another head size": (
        LAYER | {"head_dim": 32},
        {},
        r"[kq]_proj.weight is .*; allowed: \((64|128), 64\)",
    ),
    "no heads": (
        CONFIGS["medusa"] | {"medusa_num_heads": 0},
        {},
        "medusa_num_heads is 0; allowed: a whole number",
    ),
    "a layer that is not there": (
        CONFIGS["eagle3"] | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        {},
        r"eagle_aux_hidden_state_layer_ids is \[0, 1, 3\]; allowed: 3 ascending numbers of layers, 0…2",
    ),
    "words for layers": (
        CONFIGS["eagle3"] | {"eagle_aux_hidden_state_layer_ids": "low"},
        {},
        "eagle_aux_hidden_state_layer_ids is 'low'",
    ),
    "more tokens than there are": (
        CONFIGS["eagle3"] | {"draft_vocab_size": 513},
        {},
        r"draft_vocab_size is 513; .*1…512",
    ),
    "another shape": (
        CONFIGS["eagle"],
        with_shape("eagle", "fc.weight", (64, 192)),
        r"checkpoint tensor fc.weight is \(64, 192\); allowed: \(64, 128\)",
    ),
    "a missing tensor": (
        CONFIGS["eagle3"],
        without("eagle3", "midlayer.hidden_norm.weight"),
        "without midlayer.hidden",
    ),
    "no map of tokens": (
        CONFIGS["eagle3"],
        without("eagle3", "d2t"),
        "checkpoint is 'without d2t'",
    ),
    "a map out of the vocabulary": (
        CONFIGS["eagle3"],
        random_heads("eagle3") | {"d2t": torch.full((NUM_DRAFT_TOKENS,), 400)},
        "checkpoint tensor d2t is '400…599'; allowed: token ids 0…511",
    ),
    "a map of fractions": (
        CONFIGS["eagle3"],
        random_heads("eagle3") | {"d2t": torch.full((NUM_DRAFT_TOKENS,), 0.5)},
        "dtype of tensor d2t is 'torch.float32'; allowed: torch.int64 or torch.int32",
    ),
    "a tensor too many": (
        CONFIGS["medusa"],
        with_shape("medusa", "9.1.weight", (512, 64)),
        "9.1.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "torch"])
def test_heads_that_do_not_fit_are_refused_by_name(
    folder: Path, tmp_path: Path, case: str, pickled: bool
) -> None:
    config, tensors, sentence = REFUSED[case]
    heads = publish(tmp_path / "heads", config, tensors or random_heads("eagle"), pickled=pickled)
    options = ExecutorOptions(model_folder=folder, draft_heads=heads, max_draft_tokens=MAX_DRAFTS)
    with pytest.raises(
        ConfigError, match=f"draft_heads is '{heads}'; allowed: heads for the served .*{sentence}"
    ):
        checked(options, "cpu", cpu.capabilities)


@pytest.mark.parametrize(("kind", "name"), [("medusa", "0.1.weight"), ("eagle", "fc.weight")])
def test_weights_that_are_whole_numbers_are_no_heads(
    kind: str, name: str, folder: Path, tmp_path: Path
) -> None:
    """Those of a packed checkpoint whose scales are elsewhere, for instance."""
    tensors = random_heads(kind)
    heads = publish(
        tmp_path / "heads", CONFIGS[kind], tensors | {name: tensors[name].to(torch.int8)}
    )
    served = registry.read_config(folder)
    config = read_heads(heads, served)
    with pytest.raises(
        ConfigError,
        match=f"dtype of tensor {name} is 'torch.int8'; allowed: weights in floating point",
    ):
        load_heads(heads, config, served, torch.float32, torch.device("cpu"))


def test_a_damaged_file_of_torch_is_refused_in_a_sentence(tmp_path: Path) -> None:
    heads = publish(
        tmp_path / "heads", CONFIGS["eagle"], {"fc.weight": torch.ones(3)}, pickled=True
    )
    path = heads / "pytorch_model.bin"
    path.write_bytes(path.read_bytes().replace(b"fc.weight", b"\xff\xff.weight"))
    with pytest.raises(
        ConfigError,
        match=r"or tensors alone as torch.save writes them \(a name in it is not UTF-8\)",
    ):
        HeadsFile(heads)
    torch.save({1: torch.ones(3)}, path)
    with pytest.raises(ConfigError, match="allowed: tensors by name"):
        HeadsFile(heads)


def test_a_file_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    publish(heads, CONFIGS["eagle"], {}, pickled=True)
    torch.save({"fc.weight": HeadsTwin}, heads / "pytorch_model.bin")
    options = ExecutorOptions(model_folder=folder, draft_heads=heads, max_draft_tokens=MAX_DRAFTS)
    with pytest.raises(ConfigError, match="tensors alone as torch"):
        checked(options, "cpu", cpu.capabilities)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_draft_tokens": 0}, "none where nothing is drafted"),
        ({"draft_model": "folder"}, "none with draft_model"),
    ],
    ids=str,
)
def test_heads_are_refused_where_they_would_not_draft(
    folder: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    heads = publish(tmp_path / "heads", CONFIGS["eagle"], random_heads("eagle"))
    given = (
        {"max_draft_tokens": MAX_DRAFTS}
        | options
        | ({"draft_model": folder} if "draft_model" in options else {})
    )
    asked = ExecutorOptions(model_folder=folder, draft_heads=heads, **given)
    with pytest.raises(ConfigError, match=f"draft_heads is .*; allowed: {sentence}"):
        checked(asked, "cpu", cpu.capabilities)


def test_the_memory_of_a_cache_holds_the_planes_of_heads(folder: Path, tmp_path: Path) -> None:
    heads = publish(tmp_path / "heads", CONFIGS["eagle"], random_heads("eagle"))
    sized = {"num_blocks": 0, "kv_cache_memory": 64 << 20}
    alone = SmallEngine(folder, **sized)
    both = SmallEngine(folder, **sized, draft_heads=heads, max_draft_tokens=3)
    # A layer of two heads of 16 beside three of two heads of 32.
    assert both.config.num_blocks == alone.config.num_blocks * 6 // 7
    alone.close()
    both.close()
