"""The manifest of a converted model folder (`model.json`): facts of a model that every stage may
know without its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..runtime.served_model import CLASSIFY, GENERATE

ROUNDED_KINDS = ("fp8", "int8", "int4")
"""Kinds that weights which are not packed can be rounded to when a model is converted."""
MODEL_CODES = ("auto", "headwater", "transformers")
"""Owners of the modelling code of a model. `auto`: Headwater, or transformers where Headwater has
none."""


MANIFEST_NAME = "model.json"
LAYOUT = "v3"
"""Name of the weight layout that this version writes; a change of layout is a new folder."""
WEIGHTS_NAME = "weights.safetensors"
READABLE_LAYOUTS = ("v1", "v2", LAYOUT)
"""Layouts that this version's kernels read."""


class ModelFolderError(Exception):
    """A folder that no stage can serve from, with the reason."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"{folder} is not a converted model: {reason} (make one with `headwater pull`)"
        )
        self.folder = folder
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteraction:
    """How a model compares a query and a document token by token."""

    query_len: int
    """Tokens that a query is filled up to with mask tokens; 0: it stays as it is."""
    attends_to_expansion: bool
    """Whether tokens attend to these mask tokens."""
    skipped_words: tuple[str, ...]
    """Words of documents whose vectors are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """Facts of one converted model; `weights.safetensors`, `config.json` and the tokenizer's files
    lie beside it."""

    name: str
    """Name by which clients ask for the model, unless a stage is given another one."""
    revision: str
    """Revision of the weights: a commit, or a digest of the source file."""
    dtype: str
    """Type of weights and activations: `float32`, `bfloat16` or `float16`."""
    layout: str
    """Layout of the weights in their file."""
    architecture: str
    """Architecture as in `config.json`: `LlamaForCausalLM`, …"""
    vocab_size: int
    """Number of rows of the embedding, that is, of token ids."""
    max_model_len: int
    """Number of tokens that the model was trained to read."""
    eos_token_ids: tuple[int, ...]
    """Tokens of which each ends an answer."""
    bos_token_id: int | None
    """Token that opens a text, where the model has such a token."""
    source: str
    """Source of the weights, for people."""
    quantization: str = ""
    """Method by which the weights are packed, kind that they were rounded to, or `none`; empty: not
    known."""
    rounding: str = ""
    """Loss by rounding, for people; empty: they were not rounded."""
    model_code: str = "headwater"
    """Owner of the modelling code: one of `MODEL_CODES` but `auto`."""
    task: str = GENERATE
    """Task of the model: `generate` (it embeds too), `embed` or `classify`."""
    labels: tuple[str, ...] = ()
    """Labels whose scores a model that classifies makes."""
    pooling: str = ""
    """Pooling of hidden states by default: last, mean, cls or token; empty: the files do not
    say."""
    late_interaction: LateInteraction | None = None
    has_token_weights: bool = False
    """Whether it makes a weight of each token."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that go before an embedded one, by name."""
    default_prompt: str = ""
    """Name of the default one; empty: there is none."""
    left_out: str = ""
    """Tensors of the checkpoint that are not used, for people; empty: there are none."""

    @property
    def has_cache(self) -> bool:
        """Whether engines keep keys and values of it: encoders have none. Only a decoder's head of
        labels reads the last token's state."""
        return self.task == GENERATE or (self.task == CLASSIFY and self.pooling == "last")

    @classmethod
    def read(cls, folder: Path) -> ModelManifest:
        """Manifest of a folder. Raises `ModelFolderError` where there is none, it does not parse,
        or its weights are in a layout that this version does not read."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=cls)
        except FileNotFoundError:
            raise ModelFolderError(folder, f"{MANIFEST_NAME} is missing") from None
        except msgspec.MsgspecError as error:
            raise ModelFolderError(folder, f"{MANIFEST_NAME}: {error}") from None
        if manifest.layout not in READABLE_LAYOUTS:
            allowed = ", ".join(READABLE_LAYOUTS)
            raise ModelFolderError(
                folder, f"its layout is {manifest.layout!r}; this version reads {allowed}"
            )
        return manifest

    def write(self, folder: Path) -> None:
        (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def weight_bytes(folder: Path) -> int:
    """Size of a folder's weights in bytes; 0 where it has none, as a folder of text stages may."""
    try:
        return (folder / WEIGHTS_NAME).stat().st_size
    except FileNotFoundError:
        return 0
