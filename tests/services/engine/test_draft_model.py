"""Draft models through the engine service: answers, metrics, and what is refused before anything is
loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.engine_core.scheduling.speculation.model_speculator import NAME, PROBE_STEPS
from headwater.proto.common_pb2 import Sampling, Speculative
from headwater.services.runtime.speculation import DRAFT_MODEL
from tests.chatting_model import make_chatting_model
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)
from tests.services.engine.test_kv_swap import metrics

SMALL = (
    "--executor=single",
    "--device=cpu",
    "--max-model-len=512",
    "--num-blocks=100",
    "--max-num-seqs=8",
)
DRAFTED, ACCEPTED = (
    f"headwater_spec_decode_num_{which}_tokens_total" for which in ("draft", "accepted")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("served"))


def test_the_drafter_has_one_name() -> None:
    assert NAME == DRAFT_MODEL


@pytest.mark.long
async def test_an_engine_answers_the_same_with_a_draft_model(folder: Path) -> None:
    """A model as large as the served one never pays, so it is asked for one token in so many
    steps."""
    max_tokens = 3 * PROBE_STEPS
    reported = []
    sampling = Sampling(
        temperature=0.0, max_tokens=max_tokens, speculative=Speculative(drafter=DRAFT_MODEL)
    )
    for flags in ((), (f"--draft-model={folder}",)):
        with engine_process(f"--model-folder={folder}", *SMALL, *flags) as engine:
            async with client_of(engine) as client:
                await client.send(add(1, list(range(20, 50)), max_tokens, sampling=sampling))
                await client.read_until_finished(1)
            reported.append(client.tokens[1])
            figures = await metrics(engine)
    assert reported[0] == reported[1]
    assert len(reported[0]) > PROBE_STEPS
    assert figures[ACCEPTED] == figures[DRAFTED] > 0


async def test_a_simulated_engine_pretends_to_have_one() -> None:
    with engine_process("--simulated-draft-acceptance=0.8") as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), max_tokens=10 * PROBE_STEPS))
            await client.read_until_finished(1)
        assert client.tokens[1] == answer(prompt(1), 10 * PROBE_STEPS)
        figures = await metrics(engine)
    # How many are drafted follows from how long steps take here.
    assert 0 < figures[ACCEPTED] <= figures[DRAFTED]


def test_a_model_of_other_tokens_is_refused_before_it_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    draft = make_chatting_model(tmp_path, num_layers=1)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|go|>"
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine = EngineProcess(f"--model-folder={folder}", *SMALL, f"--draft-model={draft}")
    assert engine.wait() != 0
    message = engine.close()
    assert (
        f"--draft-model is '{draft}'; allowed: a model of the tokens of chatting; its token"
        in message
    )
    assert "'<|go|>', there '<|im_start|>'" in message


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--draft-model=/no/folder",),
            "/no/folder is not a converted model: model.json is missing",
        ),
        (
            ("--draft-model=/no/folder", "--speculation=off"),
            "allowed: none with --speculation off, where",
        ),
    ],
    ids=["no model", "no speculation"],
)
def test_what_cannot_draft_is_refused_in_one_line(
    folder: Path, flags: tuple[str, ...], sentence: str
) -> None:
    engine = EngineProcess(f"--model-folder={folder}", *SMALL, *flags)
    assert engine.wait() != 0
    assert sentence in engine.close()


def test_a_simulated_engine_has_none(folder: Path) -> None:
    engine = EngineProcess(
        f"--model-folder={folder}", f"--draft-model={folder}", "--max-model-len=512"
    )
    assert engine.wait() != 0
    assert "allowed: none with executor simulated" in engine.close()
