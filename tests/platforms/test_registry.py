from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.workloads import TINY
from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.hooks import Hooks
from headwater.engine_core.executors.build.registry import build_executor as build_by_name
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms import loading, registry
from headwater.engine_core.platforms.device import OPTIONAL
from headwater.services.runtime.settings import SettingError
from tests.platforms.installed import WHOLE, install
from tests.services.stack.test_plan import plan


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def options(tmp_path: Path) -> ExecutorOptions:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ExecutorOptions(
        model_folder=tmp_path,
        load_format="dummy",
        num_blocks=64,
        max_model_len=64,
        max_num_batched_tokens=256,
    )


def test_devices_are_listed_without_torch_or_numpy() -> None:
    probe = "import sys; sys.modules |= dict.fromkeys(('torch', 'triton', 'numpy')); "
    probe += (
        "from headwater.engine_core.platforms.registry import device_names; print(*device_names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.startswith("auto cuda cpu"), done.stderr


def test_the_devices_of_headwater_are_known_where_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    assert registry.device_names() == ("auto", "cuda", "cpu")


def test_an_installed_platform_is_a_device_that_a_line_may_name(site: Path) -> None:
    with pytest.raises(SettingError, match="--device is 'thistle'; allowed: auto, cuda, cpu"):
        plan(device="thistle")
    install(site, "thistle", WHOLE + "name = 'thistle'\n")
    assert registry.device_names() == ("auto", "cuda", "cpu", "thistle")
    assert plan(device="thistle").device == "thistle"
    loaded = loading.load("thistle")
    assert (loaded.registration.distribution, loaded.registration.version) == (
        "platform-thistle",
        "1.2",
    )


def test_auto_is_never_a_platform_of_another_distribution(site: Path) -> None:
    install(site, "a-first-name", "raise RuntimeError('loaded')\n")
    assert loading.load("auto").registration.is_built_in


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            WHOLE.replace("api, ", "") + "name = 'odd'\napi = 1\n",
            "api of the platform 'odd' is 1; allowed: 2, the version of this Headwater",
        ),
        (
            WHOLE.replace("api, ", "") + "name = 'odd'\n",
            "api of the platform 'odd' is None; allowed: 2",
        ),
        (
            WHOLE.replace("environment, ", "") + "name = 'odd'\n",
            "platform 'odd' is 'without environment'; allowed: a module that offers name, "
            "capabilities, Platform",
        ),
        (
            WHOLE + "from dataclasses import replace\nname, capabilities = 'odd', "
            "replace(capabilities, graphs=True)\n",
            "platform 'odd' is 'without capture'; allowed: a module that offers name",
        ),
        (
            WHOLE + "name, capabilities = 'odd', {'dtypes': ('float32',)}\n",
            "capabilities of the platform 'odd' is {'dtypes': ('float32',)}; allowed: a "
            "`Capabilities`",
        ),
        (
            WHOLE + "name = 'even'\n",
            "name of the platform 'odd' is 'even'; allowed: odd, as its entry point says",
        ),
        (
            WHOLE + "name = 'odd'\ndef is_available(): return False\n",
            "device is 'odd'; allowed: a device that is available on this machine, or auto",
        ),
        ("import no_such_library\n", "platform-odd: No module named 'no_such_library'"),
    ],
)
def test_a_platform_that_does_not_keep_the_contract_is_refused_by_name(
    site: Path, source: str, sentence: str
) -> None:
    install(site, "odd", source)
    with pytest.raises(ConfigError) as refused:
        loading.load("odd")
    assert sentence in str(refused.value)
    sys.modules.pop("platform_odd_module", None)


HOOKED = (
    WHOLE
    + """
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.eager import build_eager
name = "hooked"
called = []

def stored_forms(request):
    called.append("stored_forms")
    return cpu.stored_forms(request)

def prepare_weights(stored, progress):
    called.append(f"prepare_weights of {stored.part or 'the model'}")
    return cpu.prepare_weights(stored, progress)

def prepare_kernels(platform, weights, progress):
    called.append("prepare_kernels")
    cpu.prepare_kernels(platform, weights, progress)

def forward_pass(model, platform, max_blocks):
    called.append(f"forward_pass of {max_blocks} blocks")
    return model.forward
"""
)


def test_an_executor_is_built_with_the_hooks_of_a_platform(
    site: Path, options: ExecutorOptions
) -> None:
    install(site, "hooked", HOOKED)
    module: Any = loading.load("hooked").device
    asked = replace(options, device="hooked", max_model_len=60)
    executor, _, _ = build_executor(asked, lambda *_: None)
    executor.close()
    assert module.called == [
        "stored_forms",
        "prepare_weights of the model",
        "prepare_kernels",
        "forward_pass of 4 blocks",
    ]


def test_a_platform_may_build_an_executor_of_its_own(site: Path, options: ExecutorOptions) -> None:
    own = """
def build_executor(request, rank, progress):
    assert rank.is_whole
    executor, config = build_eager(cpu, request, rank, progress)
    executor.is_own = True
    return executor, config
"""
    install(site, "own", HOOKED.replace("hooked", "own") + own)
    executor, _, _ = build_executor(replace(options, device="own"), lambda *_: None)
    executor.close()
    assert getattr(executor, "is_own", False)


def test_the_contract_names_every_hook() -> None:
    hooks = {each.name for each in fields(Hooks)} | {
        "prepare_products",
        "encoder_steps",
        "build_executor",
    }
    assert set(OPTIONAL) == hooks


def test_a_device_that_nobody_registered_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'; allowed: auto or cuda or cpu"):
        loading.load("tpu")


def test_a_name_that_two_distributions_register_is_nobodys(site: Path) -> None:
    install(site, "twin", WHOLE, distribution="one-twin")
    install(site, "twin", WHOLE, distribution="other-twin")
    with pytest.raises(ConfigError, match="not one-twin, other-twin"):
        loading.load("twin")


def test_a_distribution_cannot_take_the_name_of_a_device_of_headwater(site: Path) -> None:
    install(site, "cpu", "raise RuntimeError('loaded')\n", distribution="usurper")
    assert loading.load("cpu").registration.module == "headwater.engine_core.devices.cpu"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"dtype": "float16"},
            "dtype is 'float16'; allowed: float32 or bfloat16 on the platform cpu",
        ),
        ({"kv_swap_memory": 1 << 20}, "kv_swap_memory is 1048576; allowed: 0 on the platform cpu"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; allowed: auto on the platform cpu"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'; allowed: auto or fp8"),
        (
            {"activation_dtype": "int4"},
            "activation_dtype is 'int4'; allowed: auto or int8 or model",
        ),
        (
            {"activation_dtype": "int8"},
            "allowed: auto or model, for a model whose weights are no packed integers",
        ),
        ({"load_format": "lazy"}, "load_format is 'lazy'; allowed: auto or dummy or dummy-uniform"),
        ({"max_model_len": 1 << 20}, "max_model_len is 1048576; allowed: at most"),
    ],
)
def test_an_option_that_the_flags_exclude_is_refused_before_weights_are_read(
    options: ExecutorOptions, given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(replace(options, **given), "cpu", cpu.capabilities)  # type: ignore[arg-type]
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_head_dim": 8}, "head_dim is 16; allowed: at most 8 on the platform small"),
        ({"size_multiple": 48}, "head_dim is 16; allowed: multiples of 48 on the platform small"),
        ({"block_sizes": (64,)}, "block_size is 16; allowed: 64 on the platform small"),
        ({"dtypes": ("float32",)}, "dtype is 'bfloat16'; allowed: float32 on the platform small"),
    ],
)
def test_a_model_that_the_flags_exclude_is_refused_by_name(
    options: ExecutorOptions, flags: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(options, "small", replace(cpu.capabilities, **flags))  # type: ignore[arg-type]
    assert sentence in str(refused.value)


def test_an_executor_that_is_not_known_is_refused_by_name(options: ExecutorOptions) -> None:
    with pytest.raises(ConfigError, match="executor is 'fast'; allowed: single or simulated"):
        build_by_name(replace(options, executor="fast"), lambda *_: None)


def test_files_and_version_of_a_platform_enter_the_numerics_id(
    site: Path, options: ExecutorOptions, tmp_path: Path
) -> None:
    path = install(site, "clover", WHOLE + "name = 'clover'\n")

    def announced(device: str) -> str:
        executor, _, facts = build_executor(replace(options, device=device), lambda *_: None)
        executor.close()
        return facts.numerics_id

    ids = [announced("cpu"), announced("clover"), announced("clover")]
    path.write_text(path.read_text() + "# another one\n")
    ids.append(announced("clover"))
    info = site / "platform_clover-1.2.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: platform-clover\nVersion: 1.3\n")
    ids.append(announced("clover"))
    assert ids[1] == ids[2]
    assert len(set(ids)) == 4
