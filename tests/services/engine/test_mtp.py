"""The layer for multi-token prediction through the engine service: `auto` takes it by itself,
answers stay what they are, and what is refused is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.engine_core.scheduling.speculation.model_speculator import PROBE_STEPS
from headwater.proto.common_pb2 import Sampling, Speculative, StructuredOutput
from headwater.services.models.manifest import LAYOUT, ModelManifest
from headwater.services.runtime.speculation import MTP
from tests.engine_core.mtp_checkpoints import mtp_checkpoint
from tests.engine_core.small_models import SHAPE, convert
from tests.services.engine.engine_process import EngineProcess, add, client_of, engine_process
from tests.services.engine.test_draft_model import DRAFTED, SMALL
from tests.services.engine.test_kv_swap import metrics
from tests.services.text.small_tokenizers import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    mtp_checkpoint("qwen3.5", path / "hf", vocab_size=size)
    folder = convert(path / "hf", path / "ours")
    tokenizer.save(str(folder / "tokenizer.json"))
    ModelManifest(
        name="drafting",
        revision="1",
        dtype="float32",
        layout=LAYOUT,
        architecture="Qwen3_5ForCausalLM",
        vocab_size=size,
        max_model_len=SHAPE["max_position_embeddings"],
        eos_token_ids=(size - 2,),
        bos_token_id=None,
        source="random numbers",
    ).write(folder)
    return folder


@pytest.mark.long
async def test_auto_drafts_by_the_layer_and_answers_are_those_of_an_engine_that_is_off(
    folder: Path,
) -> None:
    """A random layer seldom pays, so it is asked for a token in so many steps at least. Under a
    grammar drafts are looked up and forced."""
    max_tokens = 3 * PROBE_STEPS
    asked = Sampling(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        speculative=Speculative(drafter=MTP),
    )
    grammar = Sampling(
        temperature=0.7,
        seed=3,
        max_tokens=20,
        structured_output=StructuredOutput(regex="[a-d]{20}"),
        speculative=Speculative(drafter=MTP),
    )
    reported = []
    drafted = []
    for flags in (("--speculation=off",), ()):
        with engine_process(f"--model-folder={folder}", *SMALL, *flags) as engine:
            async with client_of(engine) as client:
                await client.send(add(1, list(range(20, 50)), max_tokens, sampling=asked))
                await client.send(add(2, list(range(20, 30)), 20, sampling=grammar))
                for stream in (1, 2):
                    await client.read_until_finished(stream)
            reported.append((client.tokens[1], client.tokens[2]))
            drafted.append((await metrics(engine))[DRAFTED])
    assert reported[0] == reported[1]
    assert len(reported[0][0]) == max_tokens
    assert drafted[0] == 0 < drafted[1]


def test_mtp_without_the_checkpoints_layer_is_refused_by_its_flag(
    tmp_path: Path, folder: Path
) -> None:
    for file in folder.iterdir():
        if file.name != "mtp.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    engine = EngineProcess(f"--model-folder={tmp_path}", *SMALL, "--speculation=mtp")
    assert engine.wait() != 0
    allowed = "auto or off with a model whose checkpoint has no layer for multi-token prediction"
    assert f"speculation is 'mtp'; allowed: {allowed}" in engine.close()
