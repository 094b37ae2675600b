"""Architectures and options that transformers' modelling code is not served with, each refused by
name before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.arcee.modeling_arcee import ArceeMLP

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models import registry
from headwater.engine_core.models.foreign import library
from headwater.engine_core.models.foreign.interface import Mask, probed_mask
from headwater.engine_core.models.foreign.row_wise import Judging, RowWise
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights.json_object import read_object
from headwater.services.models.manifest import MODEL_CODES
from tests.engine_core.foreign_models import FOREIGN, PADDED, config_folder
from tests.engine_core.small_models import SmallEngine

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no interface": (
        lambda: transformers.FalconConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2),
        "architectures is 'FalconForCausalLM'; allowed: architectures whose attention goes through",
    ),
    "state beside attention": (
        lambda: transformers.RecurrentGemmaConfig(**PADDED),
        "layer_types is .*linear_attention.*; allowed: .* others keep state outside of attention",
    ),
    "convolutions": (
        lambda: transformers.Lfm2Config(**PADDED, layer_types=["conv", "full_attention", "conv"]),
        "layer_types is .*conv.*; allowed: .* others keep state outside of attention",
    ),
    "two attentions a layer": (
        lambda: transformers.DiffLlamaConfig(**PADDED),
        r"layers with attention is \[0, 0, 1, 1, 2, 2\]; allowed: 3 layers",
    ),
    "experts": (
        lambda: transformers.JetMoeConfig(**PADDED),
        "modelling code is .*experts.*; allowed: layers without experts, whose routing reads",
    ),
    "sinks": (
        lambda: transformers.GraniteSWAConfig(**PADDED),
        "keyword s_aux of attention is 'a tensor .*'; allowed: none",
    ),
    "values of another size": (
        lambda: transformers.MiniCPM3Config(**PADDED),
        "shapes of queries, keys and values is .*; allowed: equal ones in all layers",
    ),
    "masks as tensors": (
        lambda: transformers.DogeConfig(**PADDED),
        "modelling code is .*DogeForCausalLM.*; allowed: code that reads no numbers",
    ),
    "an encoder-decoder": (
        lambda: transformers.BartConfig(vocab_size=512, d_model=64),
        "is_encoder_decoder is True; allowed: false: decoders without encoders",
    ),
    "rope by a batch's length": (
        lambda: transformers.LlamaConfig(
            **PADDED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope_type is 'dynamic'; allowed: kinds that do not depend on the longest row",
    ),
    "a head behind another part": (
        lambda: transformers.OPTConfig(
            vocab_size=512, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4
        ),
        "modelling code is .*OPTForCausalLM.*decoder.*; allowed: code that reads no numbers",
    ),
    "products outside of linear layers": (
        lambda: transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4),
        "modelling code is 'one that calls addmm'; allowed: sums over a row",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(what: str, tmp_path: Path) -> None:
    make, sentence = REFUSED[what]
    hf_config = read_object(config_folder(make(), tmp_path) / "config.json")
    with pytest.raises(ConfigError, match=sentence):
        registry.config_of(hf_config | {registry.MODEL_CODE: registry.TRANSFORMERS})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; allowed: 1 with the modelling"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; allowed: 1 with the modell"),
        ({"numerics": "tree"}, "numerics is 'tree'; allowed: default with the modelling code of"),
    ],
)
def test_options_that_it_does_not_work_beside_are_refused(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = config_folder(FOREIGN["arcee"](), tmp_path)
    whole = ExecutorOptions(
        model_folder=folder, load_format="dummy", dtype="float32", max_model_len=64
    )
    checked(whole, "cpu", cpu.capabilities)
    with pytest.raises(ConfigError, match=sentence):
        checked(
            ExecutorOptions(model_folder=folder, load_format="dummy", **options),
            "cpu",
            cpu.capabilities,
        )


def test_a_config_names_whose_code_it_wants(tmp_path: Path) -> None:
    hf_config = read_object(config_folder(FOREIGN["arcee"](), tmp_path) / "config.json")
    with pytest.raises(ConfigError, match="architectures is 'ArceeForCausalLM'; allowed: Bert"):
        registry.config_of(hf_config | {registry.MODEL_CODE: "headwater"})
    with pytest.raises(ConfigError, match="headwater_model_code is 'mine'; allowed: auto or"):
        registry.config_of(hf_config | {registry.MODEL_CODE: "mine"})


def test_stages_and_engines_know_the_same_codes() -> None:
    assert registry.MODEL_CODES == MODEL_CODES


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_config = read_object(config_folder(FOREIGN["arcee"](), tmp_path) / "config.json")
    monkeypatch.setattr(library, "transformers_version", lambda: "")
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[transformers\]'"):
        registry.config_of(hf_config | {registry.MODEL_CODE: registry.TRANSFORMERS})


def test_masks_are_read_by_what_they_show() -> None:
    config = transformers.LlamaConfig(max_position_embeddings=4096)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k > q - 40)

    def chunks(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k // 512 == q // 512)

    def both_ways(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | ((q < 20) & (k < 20))

    assert probed_mask(mask_function=causal, config=config) == Mask(0, 4096)
    assert probed_mask(mask_function=window, config=config) == Mask(40, 4096)
    for other in (chunks, both_ways):
        with pytest.raises(ConfigError, match="mask is 'one with other keys of position"):
            probed_mask(mask_function=other, config=config)


def test_functions_that_join_rows_are_refused_by_name() -> None:
    x = torch.zeros(1, 3, 8)
    with Judging():
        for call in (lambda: x.cumsum(1), lambda: x @ x.transpose(1, 2), lambda: x.softmax(-1)):
            with pytest.raises(ConfigError, match="modelling code is 'one that calls "):
                call()
        with pytest.raises(ConfigError, match="one that takes a mean over 1"):
            x.mean(1)


def test_exponentials_of_a_row_have_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 37, 1003)
    with RowWise():
        whole = torch.expm1(x)
        rows = [torch.expm1(x[:, i : i + 1]) for i in range(37)]
    assert torch.equal(whole, torch.cat(rows, dim=1))
    assert torch.allclose(whole, torch.expm1(x))


def test_layers_that_join_tokens_outside_of_attention_are_found_by_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ArceeMLP.forward

    def mixed(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(mlp, x + torch.cat((x[:, :1], x[:, :-1]), dim=1))

    monkeypatch.setattr(ArceeMLP, "forward", mixed)
    folder = config_folder(FOREIGN["arcee"](), tmp_path)
    allowed = "allowed: layers that join tokens by attention alone"
    with pytest.raises(ConfigError, match=f"modelling code is 'ArceeForCausalLM'; {allowed}"):
        SmallEngine(folder, max_model_len=64, load_format="dummy", dtype="float32")
