"""A tokenizer for grammars is read once, by a process or the one that forked it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.services.grammars.grammars import grammars_of
from headwater.services.models.manifest import ModelFolderError
from headwater.services.runtime.forked import fork_server
from headwater.services.stack.fork_servers import GRAMMARS_MODULE, ForkServers


@pytest.fixture
def folder(tmp_path: Path, demo_folder: Path) -> Path:
    """A model of 256 bytes and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facts = json.loads((demo_folder / "model.json").read_text())
    facts |= {"vocab_size": 257, "eos_token_ids": [256]}
    (tmp_path / "model.json").write_text(json.dumps(facts))
    return tmp_path


def test_a_tokenizer_is_read_again_when_its_file_has_changed(folder: Path) -> None:
    before = grammars_of(folder)
    assert grammars_of(folder) is before
    os.utime(folder / "tokenizer.json", (1, 1))
    assert grammars_of(folder) is not before
    (folder / "model.json").unlink()
    with pytest.raises(ModelFolderError):
        grammars_of(folder)


async def test_stages_share_what_the_server_that_forked_them_has_read(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "stage_of_engines.py").write_text(
        f"from {GRAMMARS_MODULE} import _read\n"
        "def main():\n    raise SystemExit(10 + _read.cache_info().currsize)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}"}
    with fork_server([], environment=environment) as stages:
        assert stages is not None
        ForkServers(stages, None).read_tokenizers([folder, folder / "nothing"])
        forked = await stages.start("stage_of_engines", [], environment=environment, files={})
        assert forked is not None
        assert await forked.wait() == 11
