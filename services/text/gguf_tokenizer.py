"""Rebuilds a Hugging Face tokenizer from the metadata of a GGUF file. Knows nothing about the
weights in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from .named_templates import DEFAULT, listed


class GgufTokenizerError(Exception):
    """A tokenizer in GGUF metadata that is not supported here; names the key and its value."""

    def __init__(self, key: str, value: object, allowed: Sequence[str] | str) -> None:
        shown = allowed if isinstance(allowed, str) else ", ".join(allowed)
        super().__init__(f"{key} is {value!r}; known: {shown}")
        self.key = key
        self.value = value


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`, as the GGUF specification numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules by which a family cuts text into words before byte-pair merges."""

    pattern: str | None = None
    """Pattern that splits words; None: GPT-2's own."""
    before: tuple[str, ...] = ()
    """Patterns that split the text one after another before it."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a word that is a token is taken whole."""
    add_bos: bool = False
    """Whether a text begins with the BOS token if the file does not say."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_CONTRACTIONS = rf"{_CONTRACTIONS}?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASED_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASED_CONTRACTIONS}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ"
    "-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK"
    "-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-"
    "𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have cases."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}"
_KIMI_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CASED_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CASED_CONTRACTIONS}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)

# The values of `tokenizer.ggml.pre`, with the expressions that the models' authors published in
# tokenizer.json.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "default": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "starcoder": PreTokenizer(single_digits=True),
    "refact": PreTokenizer(single_digits=True),
    "command-r": PreTokenizer(single_digits=True, nfc=True, add_bos=True),
    "llama-bpe": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "lfm2": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "falcon-h1": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "qwen35": PreTokenizer(_QWEN3_5, nfc=True),
    "deepseek-coder": PreTokenizer(r"\p{N}", before=_DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(r"\p{N}", before=_DEEPSEEK_LLM),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3, before=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+")),
    "kimi-k2": PreTokenizer(_KIMI),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2, nfc=True, add_bos=True),
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "gpt-4o": PreTokenizer(_GPT4O),
    "chatglm-bpe": PreTokenizer(_LLAMA3),
    "glm4": PreTokenizer(_LLAMA3, ignore_merges=True),
    "glm5": PreTokenizer(_LLAMA3, ignore_merges=True),
    "exaone": PreTokenizer(single_digits=True),
    "exaone4": PreTokenizer(),
    "hunyuan": PreTokenizer(_QWEN2),
    "minimax-m2": PreTokenizer(_GPT4O),
    "olmo": PreTokenizer(nfc=True),
    "pixtral": PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizer(_SEED),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}

TEMPLATE = "tokenizer.chat_template"
"""Key of the template for chats; the keys of other templates add a dot and a name."""
# Control tokens that end an answer, although the file's `eos_token_id` names only one of them.
END_OF_ANSWER = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|observation|>",
    "<|return|>",
    "<|call|>",
)


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json. Raises
    `GgufTokenizerError`."""
    metadata = Metadata.read(gguf_path)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "generation_config.json", generation_config(metadata))


class Metadata:
    """Keys of a GGUF file that describe text."""

    def __init__(self, values: dict[str, Any], pre_tokenizer: PreTokenizer | None = None) -> None:
        """`pre_tokenizer`: in place of the one that a key names. Raises `GgufTokenizerError`."""
        self._values = values
        self._pre_tokenizer = pre_tokenizer
        self.tokens: list[str] = self.listed("tokens", str)
        self.types = self._types()
        if self.is_sentencepiece:
            # Converters spell the spaces of user-defined pieces as such; SentencePiece sees text
            # whose spaces are ▁.
            kinds = zip(self.tokens, self.types, strict=True)
            self.tokens = [
                t.replace(" ", "▁") if kind == TokenType.USER_DEFINED else t for t, kind in kinds
            ]

    @classmethod
    def read(cls, path: Path) -> Metadata:
        """Raises `GgufTokenizerError`."""
        from gguf import GGUFReader  # noqa: PLC0415 (a fifth of a second that only a conversion needs)

        try:
            fields = GGUFReader(path).fields
            values = {
                key: field.contents()
                for key, field in fields.items()
                if key.startswith("tokenizer.")
            }
        except (ValueError, LookupError) as error:
            raise GgufTokenizerError(
                "checkpoint file", path.name, f"a whole GGUF file ({error})"
            ) from None
        return cls(values)

    def __getitem__(self, name: str) -> Any:
        key = f"tokenizer.ggml.{name}"
        if key not in self._values:
            raise GgufTokenizerError(key, None, "a file that carries its tokenizer")
        return self._values[key]

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(f"tokenizer.ggml.{name}", default)

    def listed(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """The items of a key, all of one kind. Raises `GgufTokenizerError`."""
        items = self[name]
        if not isinstance(items, list) or not all(isinstance(each, kind) for each in items):
            shown = f"{len(items)} items" if isinstance(items, list) else items
            raise GgufTokenizerError(f"tokenizer.ggml.{name}", shown, f"a list of {kind.__name__}")
        if length not in (None, len(items)):
            raise GgufTokenizerError(
                f"tokenizer.ggml.{name}", f"{len(items)} items", f"{length}, as tokens"
            )
        return items

    def _types(self) -> list[TokenType]:
        if self.get("token_type") is None:
            return [TokenType.NORMAL] * len(self.tokens)
        numbers = self.listed("token_type", int, len(self.tokens))
        if unknown := set(numbers) - set(TokenType):
            raise GgufTokenizerError(
                "tokenizer.ggml.token_type", min(unknown), f"1…{max(TokenType)}"
            )
        return [TokenType(number) for number in numbers]

    def id_of(self, name: str) -> int | None:
        """The token that the key `<name>_token_id` points to. Raises `GgufTokenizerError`."""
        token_id = self.get(f"{name}_token_id")
        if token_id is not None and not (
            isinstance(token_id, int) and 0 <= token_id < len(self.tokens)
        ):
            allowed = f"token ids 0…{len(self.tokens) - 1}"
            raise GgufTokenizerError(f"tokenizer.ggml.{name}_token_id", token_id, allowed)
        return token_id

    @property
    def chat_template(self) -> Any:
        """Chat template as in `tokenizer_config.json`; None: the file has none."""
        own = self._values.get(TEMPLATE)
        others = {
            key.removeprefix(f"{TEMPLATE}."): source
            for key, source in self._values.items()
            if key.startswith(f"{TEMPLATE}.")
        }
        if not others:
            return own
        return listed({**({} if own is None else {DEFAULT: own}), **others})

    @property
    def is_sentencepiece(self) -> bool:
        return self["model"] in ("llama", "gemma4")

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        if self._pre_tokenizer is not None:
            return self._pre_tokenizer
        name = self.get("pre", "default")
        if name not in PRE_TOKENIZERS:
            raise GgufTokenizerError("tokenizer.ggml.pre", name, list(PRE_TOKENIZERS))
        return PRE_TOKENIZERS[name]

    @property
    def adds_bos(self) -> bool:
        return bool(self.get("add_bos_token", self.is_sentencepiece or self.pre_tokenizer.add_bos))

    def token(self, name: str) -> str | None:
        """Text of the token that the key `<name>_token_id` points to."""
        token_id = self.id_of(name)
        return None if token_id is None else self.tokens[token_id]

    def token_ids_that_end(self) -> list[int]:
        ids = [self.id_of(name) for name in ("eos", "eot", "eom")]
        ids += [i for i, token in self.of_type(TokenType.CONTROL) if token in END_OF_ANSWER]
        return list(dict.fromkeys(i for i in ids if i is not None))

    def of_type(self, *types: TokenType) -> list[tuple[int, str]]:
        return [
            (i, token)
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in types
        ]


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer of the file's family, special tokens included."""
    builders: dict[str, Callable[[Metadata], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _sentencepiece,
    }
    if metadata["model"] not in builders:
        raise GgufTokenizerError("tokenizer.ggml.model", metadata["model"], list(builders))
    tokenizer = builders[metadata["model"]](metadata)
    tokenizer.add_special_tokens(
        [_added(token) for _, token in metadata.of_type(TokenType.CONTROL)]
    )
    tokenizer.add_tokens([_added(token) for _, token in metadata.of_type(TokenType.USER_DEFINED)])
    _add_template_processor(tokenizer, metadata)
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _byte_level(metadata: Metadata) -> Tokenizer:
    """Tokenizer with GPT-2's byte-level merges."""
    pre = metadata.pre_tokenizer
    vocab = {token: i for i, token in enumerate(metadata.tokens)}
    merges = [merge.partition(" ")[::2] for merge in metadata.listed("merges", str)]
    for left, right in merges:
        if not {left, right, left + right} <= vocab.keys():
            raise GgufTokenizerError(
                "tokenizer.ggml.merges", f"{left} {right}", "two tokens that make a third one"
            )
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    patterns = pre.before if pre.pattern is None else (*pre.before, pre.pattern)
    cuts += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(metadata.get("add_space_prefix", False)),
        use_regex=pre.pattern is None,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level]) if cuts else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    """Tokenizer with SentencePiece's merges (Llama 2, Mistral), and bytes for text that no piece
    spells."""
    vocab = {token: i for i, token in enumerate(metadata.tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_listed_merges(metadata, vocab) or _merges(metadata),
            unk_token=metadata.token("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    if prefix and metadata.get("only_first_prefix", False):
        # Files of GGUF have no such key: text after a special token has a prefix too.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        tokenizer.normalizer = spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _listed_merges(metadata: Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges that a file lists beside its pieces; empty: it lists none. Raises
    `GgufTokenizerError`."""
    if metadata.get("merges") is None:
        return []
    pairs = []
    for merge in metadata.listed("merges", str):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            allowed = "two tokens that make a third one"
            raise GgufTokenizerError("tokenizer.ggml.merges", f"{left} {right}", allowed)
        pairs.append((left, right))
    return pairs


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """Merges of a SentencePiece model, which keeps a score for each piece instead: two pieces merge
    into the pair that scores best, and before all others into a user-defined one."""
    listed = metadata.listed("scores", float, len(metadata.tokens))
    scores = {token: listed[i] for i, token in metadata.of_type(TokenType.NORMAL)}
    scores |= {token: math.inf for _, token in metadata.of_type(TokenType.USER_DEFINED)}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(left, right) for _, left, right in merges]


def _add_template_processor(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Adds the special tokens that `add_special_tokens` puts around a text."""
    before = [metadata.token("bos")] if metadata.adds_bos else []
    after = [metadata.token("eos")] if metadata.get("add_eos_token", False) else []
    around = [token for token in [*before, *after] if token is not None]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(t for t in before if t), "$A", *(t for t in after if t)],
            pair=[*(t for t in before if t), "$A", "$B", *(t for t in after if t)],
            special_tokens=[
                (token, metadata.tokens.index(token)) for token in dict.fromkeys(around)
            ],
        )


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{name}_token": metadata.token(key) for name, key in named.items()}
    config: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    config |= {"add_bos_token": metadata.adds_bos, "clean_up_tokenization_spaces": False}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    if metadata.chat_template is not None:
        config["chat_template"] = metadata.chat_template
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    config: dict[str, Any] = {"eos_token_id": metadata.token_ids_that_end()}
    if (bos := metadata.id_of("bos")) is not None:
        config["bos_token_id"] = bos
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
