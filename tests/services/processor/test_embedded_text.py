"""Texts for an encoder: special tokens, prompts by name, cuts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headwater.engine_core.kv.prefix_hash import HASH_LEN
from headwater.proto import common_pb2, processor_pb2
from headwater.services.engine.programs.convert import ConvertSettings, convert
from headwater.services.processor.prepare import prepare
from headwater.services.runtime.errors import BadRequest, ContextTooLong
from headwater.services.runtime.request_limits import WHAT_FITS
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from tests.engine_core.small_encoders import (
    random_classifier,
    random_encoder,
    write_modules,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", "a", "b", "c", "##s"]
CLS, SEP, QUERY, COLON, A, B, C = 2, 3, 4, 5, 6, 7, 8


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    # As published files have it; here nothing is cut unless a client asks for it.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    source = tmp_path_factory.mktemp("source")
    random_encoder("bert", source)
    write_tokenizer(source)
    write_modules(source, "cls_token")
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    prompts = {"prompts": {"query": "query: ", "plain": ""}, "default_prompt_name": None}
    (source / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    folder = tmp_path_factory.mktemp("model")
    convert(ConvertSettings(source=source, folder=folder, name="small", revision="1"))
    return load_text_model(folder, "small", ServingChoices())


def prepared(
    model: TextModel,
    text: str,
    *,
    pooling: common_pb2.Pooling.ValueType = common_pb2.POOLING_MODEL,
    prompt_name: str | None = None,
    pair: str | None = None,
    **sampling: object,
) -> processor_pb2.PrepareReply:
    request = processor_pb2.PrepareRequest(
        prompt=processor_pb2.Prompt(text=text, pair=pair),
        sampling=common_pb2.Sampling(**sampling),  # type: ignore[arg-type]
        cache_namespace=bytes(HASH_LEN),
        pooling=pooling,
        prompt_name=prompt_name,
    )
    return prepare(model, request)


def test_a_text_stands_between_special_tokens_and_is_pooled_as_the_files_say(
    model: TextModel,
) -> None:
    reply = prepared(model, "a bs C")
    assert list(reply.prompt_ids) == [CLS, A, B, 9, C, SEP]
    assert reply.pooling == common_pb2.POOLING_CLS
    assert reply.sampling.max_tokens == 0
    mean = prepared(model, "a", pooling=common_pb2.POOLING_MEAN)
    assert mean.pooling == common_pb2.POOLING_MEAN
    assert model.served.capabilities == ("embedding", "rerank", "score")


def test_a_prompt_goes_before_the_text_by_its_name(model: TextModel) -> None:
    assert list(prepared(model, "a", prompt_name="query").prompt_ids) == [CLS, QUERY, COLON, A, SEP]
    assert list(prepared(model, "a", prompt_name="plain").prompt_ids) == [CLS, A, SEP]
    with pytest.raises(BadRequest, match="prompt_name is 'passage'; allowed: query, plain"):
        prepared(model, "a", prompt_name="passage")


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"truncate_prompt_tokens": 4}, [CLS, A, B, SEP]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [CLS, C, A, SEP]),
        ({"truncate_prompt_tokens": WHAT_FITS}, [CLS, A, B, C, A, B, C, SEP]),
        ({"truncate_prompt_tokens": 2}, [CLS, A]),
    ],
)
def test_a_text_that_is_cut_keeps_its_special_tokens(
    sampling: dict[str, object], expected: list[int], model: TextModel
) -> None:
    assert list(prepared(model, "a b c a b c a", **sampling).prompt_ids) == expected


def test_a_text_that_is_too_long_is_refused_unless_the_client_has_it_cut(model: TextModel) -> None:
    with pytest.raises(ContextTooLong, match="the prompt has 9 tokens; allowed: at most 8"):
        prepared(model, "a b c a b c a")


def test_an_encoder_is_not_asked_for_an_answer(model: TextModel) -> None:
    with pytest.raises(BadRequest, match="the model 'small' embeds texts and answers none"):
        prepared(model, "a", pooling=common_pb2.POOLING_UNSPECIFIED, max_tokens=4)


def test_tokens_of_word_pieces_spell_their_text(model: TextModel) -> None:
    assert model.tokenizer.table.bytes_of[A] == b" a"
    assert model.tokenizer.table.bytes_of[9] == b"s"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    source = tmp_path_factory.mktemp("source")
    random_classifier("bert", source)
    write_tokenizer(source)
    folder = tmp_path_factory.mktemp("model")
    convert(ConvertSettings(source=source, folder=folder, name="small", revision="1"))
    return load_text_model(folder, "small", ServingChoices(max_model_len=8))


def test_a_pair_is_two_texts_of_two_types(reranker: TextModel) -> None:
    reply = prepared(reranker, "a", pair="b c")
    assert list(reply.prompt_ids) == [CLS, A, SEP, B, C, SEP]
    assert reply.second_start == 3
    assert list(reply.labels) == ["LABEL_0"]
    assert reply.pooling == common_pb2.POOLING_CLS


def test_the_end_of_the_second_text_is_cut_and_the_first_one_never(reranker: TextModel) -> None:
    long = "b c b c b c b c"
    cut = prepared(reranker, "a a", pair=long, truncate_prompt_tokens=WHAT_FITS)
    assert list(cut.prompt_ids) == [CLS, A, A, SEP, B, C, B, SEP]
    with pytest.raises(ContextTooLong):
        prepared(reranker, "a a", pair=long)
    with pytest.raises(BadRequest, match="query is '7 tokens'; allowed: at most 4"):
        prepared(reranker, "a a a a a a a", pair="b", truncate_prompt_tokens=WHAT_FITS)


def test_a_model_that_embeds_reads_no_pairs(model: TextModel) -> None:
    with pytest.raises(BadRequest, match="the model 'small' reads no pairs"):
        prepared(model, "a", pair="b")
