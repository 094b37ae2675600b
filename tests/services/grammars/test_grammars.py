"""A tokenizer for grammars is read once, by a process or the one that forked it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.services.grammars.check_process import MODULE
from headwater.services.grammars.checker import FREE_TEXT, GrammarChecker
from headwater.services.grammars.grammars import grammars_of, prepare
from headwater.services.models.manifest import ModelFolderError
from headwater.services.runtime.forked import STAGE_FORKS_FD, fork_server
from headwater.services.stack.fork_servers import GRAMMARS_MODULE, ForkServers
from headwater.services.stack.model_stages import PROCESSOR_MODULE
from headwater.services.stack.stage_process import StageProgram
from tests.services.engine.engine_process import wait_for_end
from tests.services.grammars.test_checker import ASKER, children


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


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": {"vocab": null}}', "[" * 10_000])
def test_a_file_that_is_no_tokenizer_is_a_fault_of_the_folder(folder: Path, text: str) -> None:
    """The server that reads it for others goes on."""
    (folder / "tokenizer.json").write_text(text)
    prepare(str(folder))
    with pytest.raises(ModelFolderError, match="is no tokenizer"):
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


async def test_a_processor_has_its_checker_forked_where_the_tokenizer_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    others = children()
    with fork_server([MODULE], environment=os.environ) as stages:
        assert stages is not None
        [server] = children() - others
        forks = ForkServers(stages, None)
        forks.read_tokenizers([folder])
        program = forks.for_checks_of(StageProgram(PROCESSOR_MODULE, [], os.environ))
        assert program.files == (stages.socket.fileno(),)
        monkeypatch.setenv(STAGE_FORKS_FD, program.env[STAGE_FORKS_FD])
        async with GrammarChecker() as checker:
            await checker.warm(folder)
            [killed] = children(server)
            os.kill(killed, signal.SIGKILL)
            wait_for_end(killed, seconds=60)
            await checker.check(folder, FREE_TEXT + " ", ASKER)
            [last] = children(server) - {killed}
            assert children() - others == {server}
            assert "died" not in capfd.readouterr().out
        wait_for_end(last, seconds=60)
        os.kill(server, signal.SIGKILL)
        wait_for_end(server, seconds=60)
        # It begins in a new interpreter.
        async with GrammarChecker() as checker:
            await checker.check(folder, FREE_TEXT, ASKER)
            assert len(children() - others - {server}) == 1
