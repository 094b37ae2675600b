"""Adapters of rows: a row's answer is that of a model into which its adapter was merged, with the
same bits whatever else is in its batch."""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import conversion
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.fp8_block_models import WIDE
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_adapters import (
    CONFIG,
    HIDDEN,
    answer,
    load_adapter,
    tensors_of,
    write_adapter,
)
from tests.engine_core.small_models import (
    SHAPE,
    Answer,
    SmallEngine,
    check_greedy,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_cuda_engine import behind_the_likeliest
from tests.long_values import long_but

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (90, 41, 5, 130, 33, 60)]
SCORED = greedy(10, num_logprobs=1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK = {"cpu": 16, "cuda": 64}
ADAPTER_MEMORY = 1 << 20
NONE = b""
ROUNDED = 0.05
"""How far, in standard deviations, a logit may lie behind the likeliest one where products are
rounded."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its checkpoint, and adapters of ranks 4 and 12, the second of few layers."""
    base = tmp_path_factory.mktemp("adapters")
    random_checkpoint("qwen3", base / "hf")
    convert(base / "hf", base / "model")
    convert(base / "hf", base / "model16", "bfloat16")
    write_adapter(base / "all", tensors_of(1))
    few = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    write_adapter(base / "few", tensors_of(2, 12, few), r=12, lora_alpha=12, use_rslora=True)
    for i in range(8):
        write_adapter(base / f"many{i}", tensors_of(10 + i))
    return base


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_of(folders: Path, device: str, model: str = "model", **options: Any) -> SmallEngine:
    given = {"device": device, "block_size": BLOCK[device], "adapter_memory": ADAPTER_MEMORY}
    return SmallEngine(folders / model, **given | options)


@pytest.fixture(scope="module")
def engine(folders: Path, device: str) -> Iterator[SmallEngine]:
    made = engine_of(folders, device, "model16")
    yield made
    made.close()


@pytest.fixture(scope="module")
def digests(engine: SmallEngine, folders: Path) -> list[bytes]:
    """No adapter, and two."""
    return [NONE, load_adapter(engine, folders / "all"), load_adapter(engine, folders / "few")]


def bits(answers: list[Answer]) -> list[Any]:
    return [(each.token_ids, [score.logprob for score in each.logprobs]) for each in answers]


@pytest.fixture(scope="module")
def alone(engine: SmallEngine, digests: list[bytes]) -> list[list[Any]]:
    """By adapter and prompt: the answer of a request that is served alone."""
    return [
        [bits(answer(engine, [prompt], [digest], SCORED))[0] for prompt in PROMPTS]
        for digest in digests
    ]


def test_an_answer_is_that_of_the_merged_model(folders: Path, device: str) -> None:
    model = random_checkpoint("qwen3", folders / "again")
    engine = engine_of(folders, device)
    digest = load_adapter(engine, folders / "all")
    for name, factors in _by_layer(tensors_of(1)).items():
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            weight += 2.0 * factors["B"] @ factors["A"]
    found = answer(engine, PROMPTS, [digest] * len(PROMPTS), greedy(10))
    engine.close()
    if device == "cuda":
        # Products of float32 are rounded to TF32 there, which may choose the other of two tokens.
        answers = zip(PROMPTS, (each.token_ids for each in found), strict=True)
        assert max(behind_the_likeliest(model, *each).max() for each in answers) < ROUNDED
        return
    for prompt, each in zip(PROMPTS, found, strict=True):
        check_greedy(model, prompt, each.token_ids, 10)


def _by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, factor = name.removeprefix("base_model.model.").split(".lora_")
        found.setdefault(layer, {})[factor[0]] = tensor
    return found


def test_adapters_differ_and_no_adapter_is_the_base(
    folders: Path, device: str, alone: list[list[Any]]
) -> None:
    assert all(len({str(each) for each in answers}) == 3 for answers in zip(*alone, strict=True))
    base = SmallEngine(folders / "model16", device=device, block_size=BLOCK[device])
    found = [bits(base.answer([prompt], SCORED))[0] for prompt in PROMPTS]
    base.close()
    assert found == alone[0]


def test_mixed_batches_keep_the_bits_of_each_row(
    engine: SmallEngine, digests: list[bytes], alone: list[list[Any]]
) -> None:
    chosen = [i % 3 for i in range(len(PROMPTS))]
    for turn in range(3):
        which = [(i + turn) % 3 for i in chosen]
        found = answer(engine, PROMPTS, [digests[i] for i in which], SCORED)
        assert bits(found) == [alone[i][prompt] for prompt, i in enumerate(which)]


def test_a_prefix_of_the_same_adapter_is_hit_and_of_another_never(
    folders: Path, device: str
) -> None:
    engine = engine_of(folders, device)
    digests = [load_adapter(engine, folders / name) for name in ("all", "few")]
    prompt = PROMPTS[3]
    cached = []
    answers: dict[bytes, list[Any]] = {}
    for digest in (NONE, *digests, NONE, *digests):
        [found] = answer(engine, [prompt], [digest], SCORED)
        cached.append(found.cached_tokens)
        answers.setdefault(digest, []).append(bits([found]))
    engine.close()
    whole = len(prompt) // BLOCK[device] * BLOCK[device]
    assert cached == [0, 0, 0, whole, whole, whole]
    assert all(first == second for first, second in answers.values())


def test_chunks_keep_the_bits(folders: Path, device: str, alone: list[list[Any]]) -> None:
    engine = engine_of(folders, device, "model16", max_num_batched_tokens=32, max_num_seqs=32)
    digests = [NONE, load_adapter(engine, folders / "all"), load_adapter(engine, folders / "few")]
    which = [1, 2, 0, 1, 2, 1]
    found = answer(engine, PROMPTS, [digests[i] for i in which], SCORED)
    engine.close()
    assert bits(found) == [alone[i][prompt] for prompt, i in enumerate(which)]


def test_preempted_requests_keep_their_adapters_and_bits(folders: Path, device: str) -> None:
    long = greedy(3 * BLOCK[device])
    which = [1, 2, 0, 1, 2, 1]
    found = []
    for num_blocks in (200, 20):
        given = {"num_blocks": num_blocks, "max_model_len": min(18 * BLOCK[device], 1024)}
        engine = engine_of(folders, device, "model16", **given)
        digests = [NONE, *(load_adapter(engine, folders / name) for name in ("all", "few"))]
        answers = answer(engine, PROMPTS, [digests[i] for i in which], long)
        found.append([each.token_ids for each in answers])
        num_preemptions = engine.engine.load().num_preemptions
        engine.close()
    assert num_preemptions
    assert found[0] == found[1]


def test_a_resumed_answer_goes_on_with_the_same_bits(
    folders: Path, device: str, alone: list[list[Any]]
) -> None:
    engine = engine_of(folders, device, "model16")
    digest = load_adapter(engine, folders / "all")
    tokens, logprobs = alone[1][1]
    [found] = answer(engine, [PROMPTS[1]], [digest], SCORED, begun=[tokens[:4]])
    engine.close()
    assert bits([found]) == [(tokens[4:], logprobs[4:])]


def test_choices_of_a_request_share_its_prompt_and_keep_its_adapter(
    folders: Path, device: str
) -> None:
    """Two choices are drawn from one prompt, beside a row of another adapter before."""
    drawn = SamplingParams(temperature=1.0, seed=11, max_tokens=8, num_logprobs=1)
    engine = engine_of(folders, device, "model16")
    own, other = (load_adapter(engine, folders / name) for name in ("all", "few"))
    together = answer(engine, [PROMPTS[0]] * 3, [own] * 3, drawn, forks=True)
    alone = [
        bits(answer(engine, [PROMPTS[0]] * (i + 1), [own] * (i + 1), drawn, forks=True))[i]
        for i in range(3)
    ]
    others = answer(engine, [PROMPTS[0]] * 3, [other] * 3, drawn, forks=True)
    engine.close()
    assert bits(together) == alone
    assert len({tuple(each.token_ids) for each in together}) == 3
    assert bits(others) != bits(together)


def test_requests_wait_for_a_slot_where_adapters_are_too_many(folders: Path, device: str) -> None:
    roomy = engine_of(folders, device, "model16")
    digests = [load_adapter(roomy, folders / f"many{i}") for i in range(8)]
    prompts = [PROMPTS[1]] * 8
    expected = [bits(answer(roomy, [PROMPTS[1]], [each], SCORED))[0] for each in digests]
    roomy.close()
    tight = engine_of(
        folders, device, "model16", adapter_memory=_bytes_of_slots(folders, 2, device)
    )
    for i in range(8):
        load_adapter(tight, folders / f"many{i}")
    found = answer(tight, prompts, digests, SCORED)
    slots = tight.engine._scheduler.adapters
    assert bits(found) == expected
    assert len(slots.resident) == 2
    assert slots.num_copied >= 8
    tight.close()


WHOLE = [pytest.mark.long, pytest.mark.timeout(7200)]
LOADS = [(40, 4, 2), pytest.param(10_000, 1_000, 64, marks=WHOLE)]
"""Loads, adapters in host memory at a time, and slots of the device."""


@pytest.mark.parametrize(("num_loads", "num_kept", "num_slots"), LOADS)
def test_loads_and_unloads_leave_no_memory_behind(
    folders: Path, tmp_path: Path, num_loads: int, num_kept: int, num_slots: int
) -> None:
    """Each version has another hash: its config differs. Requests have versions that were read
    some time ago, so that adapters leave the device and come back."""
    num_bytes = _bytes_of_slots(folders, num_slots, "cpu")
    engine = engine_of(folders, "cpu", "model16", adapter_memory=num_bytes)
    host = engine.executor.host_adapters  # type: ignore[attr-defined]
    slots = engine.engine._scheduler.adapters
    one = write_adapter(tmp_path / "one", tensors_of(1))
    config = one / "adapter_config.json"
    random = np.random.default_rng(1)
    kept: list[bytes] = []
    used = []
    for i in range(num_loads):
        config.write_text(json.dumps(CONFIG | {"lora_alpha": 1 + i}))
        kept.append(load_adapter(engine, one))
        if len(kept) > num_kept:
            dropped = kept.pop(0)
            assert engine.engine.remove_adapter(dropped)
            host.drop(dropped)
        if i % 10 == 0:
            chosen = [kept[each] for each in random.integers(len(kept), size=4)]
            found = answer(engine, [PROMPTS[2]] * 4, chosen, greedy(2))
            assert [len(each.token_ids) for each in found] == [2] * 4
            assert host.num_kept == len(kept)
            assert len(slots.resident) <= host.num_ranks // 8
        if i % 10 == 0 and len(kept) == num_kept:
            gc.collect()
            used.append(_resident_bytes())
    for digest in kept:
        assert engine.engine.remove_adapter(digest)
        host.drop(digest)
    assert host.num_kept == 0
    assert slots.resident == []
    assert not any(slots.knows(digest) for digest in kept)
    grown = used[-1] - used[len(used) // 2]
    print(f"{slots.num_copied} copies to the device, {grown} bytes more after half of the loads")
    # Ten adapters take 300 kB; so may the allocator's own growth.
    assert grown < 32 << 20, f"{grown} bytes more after half of the loads"
    engine.close()


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def _bytes_of_slots(folders: Path, num_slots: int, device: str) -> int:
    """Memory for so many adapters of rank 8."""
    probe = engine_of(folders, device, "model16")
    num_ranks = probe.executor.host_adapters.num_ranks  # type: ignore[attr-defined]
    probe.close()
    return num_slots * 8 * (ADAPTER_MEMORY // num_ranks)


def test_an_adapter_is_removed_when_no_request_has_it(folders: Path, device: str) -> None:
    engine = engine_of(folders, device, "model16")
    digest = load_adapter(engine, folders / "all")
    assert load_adapter(engine, folders / "all") == digest
    answer(engine, [PROMPTS[2]], [digest], greedy(3))
    assert engine.engine.remove_adapter(digest)
    engine.close()


def test_memory_for_less_than_one_adapter_is_refused(folders: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_memory is 100; allowed: 0, or \d+ bytes"):
        engine_of(folders, "cpu", adapter_memory=100)


def test_an_adapter_larger_than_the_memory_is_refused(folders: Path, tmp_path: Path) -> None:
    engine = engine_of(folders, "cpu", "model16", adapter_memory=_bytes_of_slots(folders, 2, "cpu"))
    write_adapter(tmp_path / "wide", tensors_of(1, 20, ("mlp.down_proj",)), r=20)
    with pytest.raises(ConfigError, match="rank of the adapter is 20; allowed: at most 16"):
        load_adapter(engine, tmp_path / "wide")
    engine.close()


def test_layers_beside_experts_have_adapters_and_experts_are_refused_by_name(
    tmp_path: Path,
) -> None:
    base = random_checkpoint("qwen3-moe", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "model")
    # Heads have a fourth of the hidden size here.
    kv_size = HIDDEN * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    sizes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
    sizes |= {f"self_attn.{name}_proj": (kv_size, HIDDEN) for name in "kv"}
    tensors = tensors_of(4, layers=tuple(sizes), sizes=sizes)
    write_adapter(tmp_path / "one", tensors)
    engine = engine_of(tmp_path, "cpu")
    digest = load_adapter(engine, tmp_path / "one")
    found = answer(engine, PROMPTS[:2], [digest, digest], greedy(8))
    of_expert = "base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_A.weight"
    write_adapter(tmp_path / "experts", tensors | {of_expert: torch.zeros(4, 64)})
    with pytest.raises(ConfigError, match=r"gate_proj.*adapters of experts are not served"):
        load_adapter(engine, tmp_path / "experts")
    engine.close()
    for name, factors in _by_layer(tensors).items():
        with torch.no_grad():
            base.get_submodule(name).weight += 2.0 * factors["B"] @ factors["A"]
    for prompt, each in zip(PROMPTS[:2], found, strict=True):
        check_greedy(base, prompt, each.token_ids, 8)


@pytest.mark.parametrize("kind", long_but(("fp8", "int4"), "fp8"))
def test_adapters_lie_behind_packed_layers_too(kind: str, device: str, tmp_path: Path) -> None:
    random_checkpoint("qwen3", tmp_path / "hf", **WIDE)
    (tmp_path / "model").mkdir()
    conversion.convert(
        tmp_path / "hf",
        tmp_path / "model",
        dtype="bfloat16",
        progress=lambda done, total: None,
        quantization=kind,
    )
    sizes = {"mlp.down_proj": (WIDE["hidden_size"], WIDE["intermediate_size"])}
    write_adapter(tmp_path / "one", tensors_of(3, 4, tuple(sizes), sizes))
    base = engine_of(tmp_path, device, adapter_memory=0, activation_dtype="model")
    plain = bits(base.answer(PROMPTS[:2], SCORED))
    base.close()
    if kind == "fp8" and device == "cuda":
        with pytest.raises(ConfigError, match="activation_dtype is 'auto'; allowed: model beside"):
            engine_of(tmp_path, device, adapter_memory=4 << 20)
    engine = engine_of(tmp_path, device, adapter_memory=4 << 20, activation_dtype="model")
    digest = load_adapter(engine, tmp_path / "one")
    alone = bits(answer(engine, PROMPTS[:1], [digest], SCORED))
    mixed = bits(answer(engine, [PROMPTS[0], *PROMPTS[:2]], [digest, NONE, NONE], SCORED))
    engine.close()
    assert mixed == [*alone, *plain]
    assert alone[0] != plain[0]


def test_drafts_change_no_token_of_an_adapter(folders: Path, device: str) -> None:
    engine = engine_of(folders, device, "model16", max_draft_tokens=5)
    digest = load_adapter(engine, folders / "all")
    which = [digest, NONE, digest]
    plain = answer(engine, PROMPTS[:3], which, greedy(20))
    engine.close()
    drafted = engine_of(
        folders,
        device,
        "model16",
        max_draft_tokens=5,
        speculate=lambda config: OracleSpeculator(plain, 0.4).beside(config),
    )
    load_adapter(drafted, folders / "all")
    found = answer(drafted, PROMPTS[:3], which, greedy(20))
    load = drafted.engine.load()
    drafted.close()
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert load.num_accepted_tokens > 0
