"""What an engine refuses to compute with other hosts, and what these refuse to compute."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.ranks import stage_offer
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.parallel import host_join
from headwater.engine_core.parallel.rendezvous import Rendezvous
from headwater.engine_core.platforms import loading
from headwater.engine_core.weights.fingerprint import WHOLE_BYTES
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.small_models import greedy
from tests.forked_host import OTHER, address_of, forked_host, free_address, write_secret
from tests.long_values import long_but


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"))[1]


def other_version() -> None:
    stage_offer.importlib.metadata.version = lambda name: "99.0"  # type: ignore[attr-defined]


def other_sources() -> None:
    stage_offer.sources_with = lambda others: b"other"  # type: ignore[attr-defined]


def other_numpy() -> None:
    import numpy as np  # noqa: PLC0415 (of the host's process)

    np.__version__ = "0.1"


REFUSALS: dict[str, tuple[Any, str]] = {
    "version": (other_version, "the engine is Headwater "),
    "sources": (other_sources, "the engine has other sources of Headwater"),
    "library": (other_numpy, "numpy is 0.1 here and "),
}


def changed_copy(folder: Path, copy: Path, what: str) -> Path:
    """A model that is another one by one byte of its weights, or one number of its config."""
    config = (folder / "config.json").read_text()
    weights = bytearray((folder / "weights.safetensors").read_bytes())
    if what == "weights":
        weights[-100_000] ^= 1
    else:
        config = json.dumps(json.loads(config) | {"rope_theta": 7.0})
    copy.mkdir()
    (copy / "config.json").write_text(config)
    (copy / "weights.safetensors").write_bytes(weights)
    return copy


AWAY = "^no engine is at|has not answered in time$"
"""Messages of a host while its engine has just started or is paused."""
KINDS = (*REFUSALS, "weights", "config", "folder", "secret")


@pytest.mark.parametrize("what", long_but(KINDS, "version", "secret"))
def test_a_host_that_would_compute_something_else_ends_with_one_sentence(
    what: str, qwen3: Path, tmp_path: Path
) -> None:
    """The engine goes on waiting for one that fits."""
    address = free_address()
    secret = write_secret(tmp_path)
    prepare, sentence = REFUSALS.get(what, (None, "model_folder is "))
    folder = qwen3
    shown = secret
    if what in ("weights", "config"):
        folder = changed_copy(qwen3, tmp_path / "other", what)
        sentence = (
            f"whose {'weights file' if what == 'weights' else 'config.json'} is not that "
            "of the engine's model"
        )
    elif what == "folder":
        folder = tmp_path
        sentence = "a folder with one that can be read (No such file or directory))"
    elif what == "secret":
        shown = write_secret(tmp_path, OTHER)
        sentence = "does not believe this host: it has another secret"
    with contextlib.ExitStack() as stack:
        refusing = stack.enter_context(forked_host(address, shown, folder, prepare=prepare))
        hosts = [refusing]
        message = list[str]()

        def join_another(phase: str, done: int, total: int) -> None:
            message.append(phase)
            if len(hosts) == 1 and not refusing.is_alive():
                hosts.append(stack.enter_context(forked_host(address, secret, qwen3)))

        executor, _, _ = build_executor(awaiting(qwen3, address, secret), join_another)
        executor.close()
        assert refusing.wait() == 1
        [last] = [line for line in refusing.log.text().splitlines() if not re.search(AWAY, line)]
        assert sentence in last
    assert f"waiting for other hosts at {address}: stage 1 is missing" in message


def empty_config(folder: Path) -> None:
    (folder / "config.json").write_text("")


def zeros(folder: Path) -> None:
    """Replaces the weights by zeros, as an interrupted copy does that had reserved its space."""
    os.truncate(folder / "weights.safetensors", 0)
    os.truncate(folder / "weights.safetensors", WHOLE_BYTES + 1)


def huge_header(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (
            empty_config,
            r"allowed: a converted model \(config.json is .*\(Expecting value: line 1 column 1 \(char 0\)\)\)$",
        ),
        (
            zeros,
            r"allowed: a converted model \(checkpoint file is 'weights.safetensors'; allowed: a whole file",
        ),
        (
            huge_header,
            r"allowed: a converted model \(checkpoint file is 'weights.safetensors, \d+ bytes'; allowed: a whole file",
        ),
    ],
)
def test_a_host_whose_copy_of_the_model_is_damaged_refuses_in_a_sentence(
    damage: Callable[[Path], None], reported: str, qwen3: Path, tmp_path: Path
) -> None:
    offer = stage_offer.make_offer(ExecutorOptions(model_folder=qwen3), loading.load("cpu"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "weights.safetensors"):
        (copy / name).write_bytes((qwen3 / name).read_bytes())
    assert stage_offer.accepted_options(offer, copy, 1)[0].model_folder == copy
    damage(copy)
    with pytest.raises(stage_offer.OfferRefused, match=reported):
        stage_offer.accepted_options(offer, copy, 1)


def awaiting(folder: Path, address: str, secret: Path) -> ExecutorOptions:
    return ExecutorOptions(
        model_folder=folder,
        num_threads=1,
        num_blocks=600,
        pipeline_parallel_size=2,
        stage_hosts=1,
        stage_listen=address,
        stage_secret_file=secret,
    )


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_executor(ExecutorOptions(num_threads=2, **options), lambda phase, done, total: None)
    return str(caught.value)


def test_what_cannot_be_served_with_other_hosts_is_refused_by_name(
    qwen3: Path, tmp_path: Path
) -> None:
    two = {"model_folder": qwen3, "pipeline_parallel_size": 2, "num_blocks": 600}
    assert (
        refused(**two, stage_hosts=2)
        == "stage_hosts is 2; allowed: 0…1, fewer than pipeline_parallel_size"
    )
    assert (
        refused(model_folder=qwen3, stage_hosts=1)
        == "stage_hosts is 1; allowed: 0 with pipeline_parallel_size 1"
    )
    disk = {"stage_hosts": 1, "kv_disk_dir": tmp_path}
    assert "kv_disk_dir is" in (message := refused(**two, **disk))
    assert message.endswith("allowed: none with stage_hosts 1")
    one = two | {"stage_hosts": 1}
    assert (
        refused(**one, kv_peer_memory=1 << 20)
        == "kv_peer_memory is 1048576; allowed: 0 with stage_hosts 1"
    )
    assert (
        refused(**one)
        == "stage_secret_file is None; allowed: a file with the secret of the stages on other hosts"
    )
    open_file = write_secret(tmp_path)
    open_file.chmod(0o640)
    assert "a file of mode 0600, which its owner alone may read" in refused(
        **one, stage_secret_file=open_file
    )
    short = write_secret(tmp_path, b"short")
    assert "a file with at least 32 bytes" in refused(**one, stage_secret_file=short)
    assert "(No such file or directory)" in refused(**one, stage_secret_file=tmp_path / "none")
    one |= {"stage_secret_file": write_secret(tmp_path, OTHER)}
    no_names = "engine..example:7300", f"{'e' * 64}.example:7300"
    for address in (
        "",
        "7300",
        "host:",
        "host:0",
        "host:70000",
        "fd00::1:7300",
        "host:７３００",
        *no_names,
    ):
        assert "allowed: host:port, such as 10.0.0.1:7300" in refused(**one, stage_listen=address)
    for address in ("0.0.0.0:7300", "[::]:7300", "[::0]:7300", "0:7300", "0x0:7300"):
        assert "allowed: one address of this host" in refused(**one, stage_listen=address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = address_of(server)
        message = refused(**one, stage_listen=taken)
    assert message == (
        f"stage_listen is {taken!r}; allowed: an address of this host whose port is free "
        "(Address already in use)"
    )


def test_a_platform_that_has_no_stages_on_other_hosts_is_named(qwen3: Path, tmp_path: Path) -> None:
    options = awaiting(qwen3, free_address(), write_secret(tmp_path))
    flags = replace(cpu.capabilities, stage_hosts=False)
    with pytest.raises(ConfigError) as refusal:
        checked(options, "cuda", flags)
    sentence = "stage_hosts is 1; allowed: 0 on the platform cuda"
    assert str(refusal.value) == sentence


def test_ranks_refuse_the_same_with_and_without_other_hosts(qwen3: Path, tmp_path: Path) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    options = replace(awaiting(qwen3, address, secret), num_blocks=3)
    for folders in ((), (qwen3,)):
        with contextlib.ExitStack() as stack:
            hosts = [
                stack.enter_context(forked_host(address, secret, folder)) for folder in folders
            ]
            with pytest.raises(
                ConfigError, match="num_blocks is '3'; allowed: at least 65 for max_model_len 1024"
            ):
                build_executor(options, lambda phase, done, total: None)
            for host in hosts:
                # It stays for an engine with other options.
                assert host.is_alive()


def listen_nowhere() -> None:
    """Lets ranks of this host listen for tensors at an address that it does not have."""

    def elsewhere(host: str, port: int, own_host: str) -> Rendezvous:
        return Rendezvous(host, port, "203.0.113.1")

    host_join.Rendezvous = elsewhere  # type: ignore[assignment, misc]


def test_hosts_whose_ranks_do_not_reach_one_another_are_named(qwen3: Path, tmp_path: Path) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    with (
        forked_host(address, secret, qwen3, prepare=listen_nowhere),
        pytest.raises(
            ConfigError, match=r"stage_listen is '203\.0\.113\.1'; allowed: an address where"
        ),
    ):
        build_executor(awaiting(qwen3, address, secret), lambda phase, done, total: None)


def test_an_engine_whose_stages_are_all_here_listens_nowhere(qwen3: Path) -> None:
    with engine_of(qwen3, pipeline_parallel_size=2) as two:
        assert len(two.tokens([[5, 6, 7]], greedy(4))) == 1
