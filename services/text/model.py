"""The text stages' knowledge of a model: its tokenizer, its chat template, its limits. It never
reads weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..answers.format import reasoning_format_of
from ..answers.format_names import REASONING_ALIASES, TOOL_ALIASES
from ..answers.reasoning_parser import REASONING_FORMATS
from ..answers.tool_formats import TOOL_FORMATS, format_of_template
from ..models.manifest import LateInteraction, ModelManifest, weight_bytes
from ..runtime.model_name import check_model_name
from ..runtime.served_model import CLASSIFY, GENERATE, ServedModel
from ..runtime.settings import SettingError, require
from .chat_template import ChatTemplate
from .fill_in_middle import GapMarks, marks_of
from .front_tokens import FrontTokens
from .model_limits import ModelLimits, model_defaults
from .named_templates import DEFAULT, templates_of
from .pair_template import PairTemplate, pair_template
from .tokenizer import Tokenizer, read_json

BLOCK_SIZES = (16, 32, 64, 128)
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChoices:
    """Choices of an operator that replace those of the model's files; empty or 0: the files
    decide."""

    dtype: str = ""
    kv_format: str = ""
    block_size: int = 16
    max_model_len: int = 0
    chat_template: str = ""
    trust_request_chat_template: bool = False
    generation_config: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    escape_special_tokens: bool = False
    close_schemas: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """One served model."""

    served: ServedModel
    folder: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """Template of chats without tools; None: the model has none."""
    eos_token_ids: tuple[int, ...]
    limits: ModelLimits
    choices: ServingChoices = ServingChoices()
    gap_marks: GapMarks | None = None
    """Tokens by which the model fills gaps; None: it fills none."""
    task: str = GENERATE
    """See `ModelManifest`, here and below."""
    labels: tuple[str, ...] = ()
    pooling: str = ""
    late_interaction: LateInteraction | None = None
    has_token_weights: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    pair_template: PairTemplate | None = None
    """Template of a query and a document; None: a pair is two texts between special tokens."""
    architecture: str = ""
    """Architecture as in `config.json`."""
    tool_format: str = ""
    """Format of its calls; empty: they are not looked for."""
    reasoning_format: str = ""
    """Format of its reasoning; empty: it is not looked for."""
    escapes_special_tokens: bool = False
    """Whether special tokens in the text of clients are text."""
    closes_schemas: bool = True
    """Whether objects of constrained answers have only the properties that their schema names."""
    fronts: FrontTokens = field(default_factory=FrontTokens, compare=False, repr=False)
    by_template: Mapping[str, TextModel] = field(default_factory=dict)
    """The model with each of its other templates, by the template's name."""

    @property
    def name(self) -> str:
        return self.served.name

    def with_template(self, source: str) -> TextModel:
        """The model with another chat template, and the formats that this one shows. Raises
        `ChatTemplateError`."""
        tool_format, reasoning_format = _formats(self.choices, source)
        return replace(
            self,
            chat_template=_compiled(self.tokenizer, source),
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )


def names_of(folders: Sequence[str], served_names: Sequence[str]) -> list[tuple[Path, str]]:
    """Folders with the names that they are served under. Raises `SettingError`."""
    require(folders, "model_folder", None, "a converted model folder, at least once")
    if served_names and len(served_names) != len(folders):
        raise SettingError(
            "served_model_name",
            ", ".join(served_names),
            f"as many as model folders ({len(folders)})",
        )
    paths = [Path(folder) for folder in folders]
    names = list(served_names) or [ModelManifest.read(path).name for path in paths]
    for name in names:
        check_model_name("served_model_name", name)
    require(
        len(set(names)) >= len(names), "served_model_name", ", ".join(names), "names that differ"
    )
    return list(zip(paths, names, strict=True))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Tokenizer of a folder. Raises `ModelFolderError` or `TokenizerFilesError`."""
    return Tokenizer.from_folder(folder, ModelManifest.read(folder).vocab_size)


def load_text_model(folder: Path, name: str, choices: ServingChoices) -> TextModel:
    """Model of a folder. Raises `ModelFolderError`, `TokenizerFilesError`, `ChatTemplateError` or
    `SettingError`."""
    require(
        choices.block_size in BLOCK_SIZES, "block_size", choices.block_size, "16, 32, 64 or 128"
    )
    manifest = ModelManifest.read(folder)
    tokenizer = Tokenizer.from_folder(folder, manifest.vocab_size)
    dtype = choices.dtype or manifest.dtype
    served = ServedModel(
        name=name,
        revision=manifest.revision,
        dtype=dtype,
        block_size=choices.block_size,
        kv_format=choices.kv_format or dtype,
        max_model_len=_max_model_len(choices.max_model_len, manifest.max_model_len),
        vocab_size=manifest.vocab_size,
        weight_bytes=weight_bytes(folder),
        model_code=manifest.model_code,
        task=manifest.task,
    )
    defaults = model_defaults(_generation_config(folder, choices.generation_config))
    templates = _templates(tokenizer, choices.chat_template, folder)
    source = templates.get(DEFAULT)
    template = None if source is None else _compiled(tokenizer, source)
    tool_format, reasoning_format = _formats(choices, source)
    model = TextModel(
        served=served,
        folder=folder,
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=manifest.eos_token_ids,
        limits=ModelLimits(
            vocab_size=served.vocab_size, max_model_len=served.max_model_len, defaults=defaults
        ),
        choices=choices,
        gap_marks=marks_of(tokenizer.id_of),
        task=manifest.task,
        labels=manifest.labels,
        pooling=manifest.pooling,
        late_interaction=manifest.late_interaction,
        has_token_weights=manifest.has_token_weights,
        prompts=manifest.prompts,
        default_prompt=manifest.default_prompt,
        pair_template=(
            pair_template(template, manifest.architecture, partial(_compiled, tokenizer))
            if manifest.task == CLASSIFY
            else None
        ),
        architecture=manifest.architecture,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        escapes_special_tokens=choices.escape_special_tokens,
        closes_schemas=choices.close_schemas,
    )
    others = {name: source for name, source in templates.items() if name != DEFAULT}
    named = {name: model.with_template(source) for name, source in others.items()}
    return replace(model, by_template=named)


def _formats(choices: ServingChoices, source: str | None) -> tuple[str, str]:
    """Formats of calls and of thoughts: the operator's, else those of the template. Raises
    `SettingError`."""
    tool_format = _parser(
        "tool_call_parser",
        TOOL_ALIASES.get(choices.tool_call_parser, choices.tool_call_parser),
        TOOL_FORMATS,
        format_of_template(source),
    )
    reasoning_format = _parser(
        "reasoning_parser",
        REASONING_ALIASES.get(choices.reasoning_parser, choices.reasoning_parser),
        REASONING_FORMATS,
        reasoning_format_of(source),
    )
    return tool_format, reasoning_format


def _parser(setting: str, choice: str, known: Collection[str], detected: str) -> str:
    require(
        choice in ("auto", "none", *known), setting, choice, ", ".join(("auto", "none", *known))
    )
    return {"auto": detected, "none": ""}.get(choice, choice)


def _max_model_len(asked: int, trained: int) -> int:
    require(
        0 <= asked <= trained,
        "max_model_len",
        asked,
        f"1…{trained}, what the model was trained to read",
    )
    return asked or trained


def _generation_config(folder: Path, choice: str) -> dict[str, object]:
    if choice == "none":
        return {}
    source = folder if choice == "auto" else Path(choice)
    path = source / "generation_config.json" if source.is_dir() else source
    if choice != "auto" and not path.is_file():
        raise SettingError(
            "generation_config",
            choice,
            "auto, none, a file or a folder with generation_config.json",
        )
    return read_json(path)


def _templates(tokenizer: Tokenizer, path: str, folder: Path) -> Mapping[str, str]:
    """Sources of chat templates by name: the operator's file, else those of the model."""
    require(not path or Path(path).is_file(), "chat_template", path, "a readable file")
    if path:
        return {DEFAULT: Path(path).read_text()}
    return templates_of(tokenizer.config.get("chat_template"), folder)


def _compiled(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    """Template with the special tokens that it may name. Raises `ChatTemplateError`."""
    named = {
        name: token
        for name in SPECIAL_TOKENS
        if (token := tokenizer.special_token(name)) is not None
    }
    return ChatTemplate(source, named)
