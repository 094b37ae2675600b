"""Ollama's API over HTTP: answers of chat and generate, vectors, lists of models, refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.ollama.test_scripted_lines import lines_of
from tests.gateway.processes import MODEL, THINKER, THINKER_BYTES, Behind, Gateway
from tests.gateway.request.test_explain import begun_before_its_deadline

USER = [{"role": "user", "content": "What time is it?"}]
QUIET: dict[str, Any] = {"model": THINKER, "think": False, "stream": False}
SHORT = {"temperature": 0, "num_predict": 6}
RIVER = {"type": "object", "properties": {"river": {"const": "Blau"}}, "required": ["river"]}


def chat(gateway: Gateway, **more: Any) -> dict[str, Any]:
    return answered(gateway, "/api/chat", {"messages": USER, "options": SHORT} | QUIET | more)


def answered(gateway: Gateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = gateway.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def refused(reply: httpx.Response) -> tuple[int, str]:
    """Status and sentence of a refusal, whose envelope is checked."""
    envelope = reply.json()
    assert envelope.keys() == {"error"}
    return reply.status_code, envelope["error"]


def test_options_mean_what_openais_fields_mean(thinker: Gateway) -> None:
    options = {"seed": 7, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.2, "num_predict": 12}
    fields = {"seed": 7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "max_tokens": 12}
    body = {"model": THINKER, "messages": USER, "reasoning_effort": "none"} | fields
    same = thinker.client.post("/v1/chat/completions", json=body | {"temperature": 0.9}).json()
    answer = chat(thinker, options=options | {"temperature": 0.9, "num_ctx": 4096})
    assert answer["message"]["content"] == same["choices"][0]["message"]["content"]
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 12)
    assert answer["prompt_eval_count"] == same["usage"]["prompt_tokens"]


def test_an_answer_ends_with_its_stop_string_and_matches_its_format(thinker: Gateway) -> None:
    whole = chat(thinker, format=RIVER, options={"temperature": 0})
    assert json.loads(whole["message"]["content"])["river"] == "Blau"
    cut = chat(thinker, format=RIVER, options={"temperature": 0, "stop": ["Blau"]})
    assert cut["message"]["content"] == whole["message"]["content"].split("Blau")[0]
    assert cut["done_reason"] == whole["done_reason"] == "stop"


def test_durations_are_parts_of_the_whole_in_nanoseconds(thinker: Gateway) -> None:
    answer = chat(thinker)
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert all(isinstance(answer[name], int) and answer[name] > 0 for name in parts)
    assert sum(answer[name] for name in parts) <= answer["total_duration"] < 60e9


def test_log_probabilities_come_with_their_tokens(thinker: Gateway) -> None:
    more = {"logprobs": True, "top_logprobs": 2}
    whole = chat(thinker, **more)
    assert "".join(entry["token"] for entry in whole["logprobs"]) == whole["message"]["content"]
    assert len(whole["logprobs"][0]["top_logprobs"]) == 2
    body = {"messages": USER, "options": SHORT} | QUIET | more
    lines = lines_of(thinker, "/api/chat", body | {"stream": True})
    assert [entry for line in lines[:-1] for entry in line["logprobs"]] == whole["logprobs"]


def test_generate_answers_a_prompt_by_the_template_or_as_it_is(thinker: Gateway) -> None:
    body = {"prompt": USER[0]["content"], "options": SHORT} | QUIET
    by_template = answered(thinker, "/api/generate", body)
    assert by_template["response"] == chat(thinker)["message"]["content"]
    system = {"role": "system", "content": "Be brief."}
    with_system = answered(thinker, "/api/generate", body | {"system": "Be brief."})
    same = chat(thinker, messages=[system, *USER])
    assert with_system["prompt_eval_count"] == same["prompt_eval_count"]
    raw = {name: value for name, value in body.items() if name != "think"} | {"raw": True}
    completed = thinker.client.post(
        "/v1/completions",
        json={"model": THINKER, "prompt": body["prompt"], "max_tokens": 6, "temperature": 0},
    ).json()
    assert answered(thinker, "/api/generate", raw)["response"] == completed["choices"][0]["text"]
    lines = lines_of(thinker, "/api/generate", raw | {"stream": True})
    assert "".join(line["response"] for line in lines) == completed["choices"][0]["text"]


def test_an_answer_goes_on_with_the_last_message(thinker: Gateway) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    body = {"model": THINKER, "messages": begun, "max_tokens": 6, "temperature": 0}
    more = {"continue_final_message": True, "reasoning_effort": "none"}
    same = thinker.client.post("/v1/chat/completions", json=body | more).json()
    answer = chat(thinker, messages=begun)
    assert answer["message"]["content"] == same["choices"][0]["message"]["content"]


def test_a_request_without_a_prompt_loads_its_model(thinker: Gateway) -> None:
    for path, kept in (("/api/chat", "message"), ("/api/generate", "response")):
        answer = answered(thinker, path, {"model": THINKER, "keep_alive": "5m"})
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert not answer[kept] or answer[kept]["content"] == ""
    assert answered(thinker, "/api/embed", {"model": THINKER, "input": ""})["embeddings"] == []
    assert answered(thinker, "/api/embeddings", {"model": THINKER}) == {"embedding": []}
    unknown = thinker.client.post("/api/generate", json={"model": "llama"})
    assert refused(unknown)[0] == 404
    for zero in (0, "0s", "0m", 0.0):
        reply = thinker.client.post("/api/generate", json={"model": THINKER, "keep_alive": zero})
        assert refused(reply)[1].startswith("keep_alive is not supported: 0 without a prompt")


def test_vectors_are_those_of_openais_endpoint(thinker: Gateway) -> None:
    texts = ["A river.", "A lake."]
    asked = {"model": THINKER, "input": texts}
    same = thinker.client.post("/v1/embeddings", json=asked).json()
    reply = answered(thinker, "/api/embed", asked)
    assert reply["embeddings"] == [each["embedding"] for each in same["data"]]
    assert reply["prompt_eval_count"] == same["usage"]["prompt_tokens"]
    short = answered(thinker, "/api/embed", asked | {"input": texts[0], "dimensions": 4})
    [vector] = short["embeddings"]
    assert len(vector) == 4
    assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-6)
    old = answered(thinker, "/api/embeddings", {"model": THINKER, "prompt": texts[0]})
    plain = asked | {"input": texts[0], "normalize": False}
    unscaled = thinker.client.post("/v1/embeddings", json=plain).json()
    assert old["embedding"] == unscaled["data"][0]["embedding"]


def test_texts_beyond_the_context_are_cut_unless_the_client_wants_none_of_it(
    thinker: Gateway,
) -> None:
    asked = {"model": THINKER, "input": "river " * 9000}
    assert answered(thinker, "/api/embed", asked)["prompt_eval_count"] <= 8192
    status, sentence = refused(thinker.client.post("/api/embed", json=asked | {"truncate": False}))
    assert (status, "allowed" in sentence) == (400, True)


def test_models_are_listed_and_shown(thinker: Gateway) -> None:
    for path in ("/api/tags", "/api/ps"):
        [card] = thinker.client.get(path).json()["models"]
        assert card["name"] == card["model"] == THINKER
        assert len(card["digest"]) == 64
        assert card["size"] == THINKER_BYTES
    assert card["context_length"] == 8192
    shown = answered(thinker, "/api/show", {"model": f"{THINKER}:latest"})
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    family = shown["model_info"]["general.architecture"]
    assert shown["details"]["family"] == family == "LlamaForCausalLM"
    assert shown["model_info"][f"{family}.context_length"] == 8192
    assert shown["template"] == ""
    assert answered(thinker, "/api/show", {"name": THINKER}) == shown
    assert refused(thinker.client.post("/api/show", json={"model": "llama"}))[0] == 404
    missing = refused(thinker.client.post("/api/show", json={}))
    assert missing == (400, "model is missing; allowed: a served model's name")
    assert thinker.client.get("/api/version").json()["version"].count(".") == 2


def test_the_template_is_shown_where_the_operator_allows_it(
    thinking_behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(thinking_behind, "--tokenizer-info") as gateway:
        shown = answered(gateway, "/api/show", {"model": THINKER})
        assert "<|im_start|>" in shown["template"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role is 'developer'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5; allowed: a string"),
    (
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        "messages[0].images is not supported: only text is served",
    ),
    ({"format": "yaml"}, "format is 'yaml'; allowed: json or a JSON Schema"),
    ({"format": {"type": "maybe"}}, "format"),
    ({"think": "much"}, "think is 'much'; allowed: true, false, low, medium, high or max"),
    ({"options": {"temperature": 7}}, "options.temperature is 7.0; allowed: 0…2"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0.0; allowed: "),
    ({"options": {"num_predict": 0}}, "options.num_predict is 0; allowed: at least 1, or −1"),
    ({"options": {"num_predict": -3}}, "options.num_predict is -3; allowed: at least 1"),
    ({"options": {"stop": [""]}}, "options.stop"),
    ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
    ({"options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
    ({"options": {"penalize_newline": False}}, "options.penalize_newline is not supported"),
    (
        {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
        "options.repeat_last_n is 64; allowed: −1, beside a penalty",
    ),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"template": "{{ .Prompt }}"}, "template is not supported: the operator chooses"),
    ({"truncate": True}, "truncate is not supported: a prompt that exceeds the context"),
    ({"temperature": 1}, "temperature is not supported: here it is a field of `options`"),
    ({"max_tokens": 9}, "max_tokens is not supported: here it is `options.num_predict`"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is"),
    ({"model": None}, "model is null; allowed: a served model's name"),
]


@pytest.mark.parametrize(("more", "sentence"), REFUSED, ids=[each[1][:40] for each in REFUSED])
def test_what_cannot_be_served_is_refused_by_its_name(
    thinker: Gateway, more: dict[str, Any], sentence: str
) -> None:
    body = {"messages": USER} | QUIET | more
    status, message = refused(thinker.client.post("/api/chat", json=body))
    assert (status, message[: len(sentence)]) == (400, sentence)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"suffix": "end"}, "suffix: the model 'thinking' has no tokens to fill a gap"),
        ({"suffix": "end", "system": "Be brief."}, "system is not supported: with `suffix`"),
        ({"context": [1, 2]}, "context is not supported: /api/chat goes on"),
        ({"images": ["aGk="]}, "images is not supported: only text is served"),
        ({"raw": True, "system": "Be brief."}, "system is not supported: with `raw`"),
        ({"raw": True, "think": True}, "think is not supported: with `raw`"),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)
def test_fields_of_generate_are_refused_by_name(
    thinker: Gateway, more: dict[str, Any], sentence: str
) -> None:
    reply = thinker.client.post("/api/generate", json={"model": THINKER, "prompt": "x"} | more)
    assert (400, refused(reply)[1][: len(sentence)]) == (reply.status_code, sentence)


def test_options_without_effect_are_named_in_the_log(thinker: Gateway) -> None:
    options = {"num_gpu": 1, "typical_p": 1.0, "mirostat": 0, "repeat_last_n": 64}
    chat(thinker, options=options | {"num_predict": 2}, keep_alive=-1, template="")
    for named in ("options.num_gpu", "keep_alive"):
        thinker.wait_until(lambda named=named: thinker.stage.says(f'"{named}"'))  # type: ignore[misc]
    assert not thinker.stage.says('"options.mirostat"')


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/api/pull", "`headwater pull`"),
        ("POST", "/api/create", "`headwater models load`"),
        ("POST", "/api/copy", "`headwater models load`"),
        ("DELETE", "/api/delete", "`headwater models load`"),
        ("POST", "/api/push", "models are not published"),
        ("HEAD", "/api/blobs/sha256:00", ""),
    ],
)
def test_paths_that_change_models_say_what_there_is_instead(
    gateway: Gateway, method: str, path: str, instead: str
) -> None:
    reply = gateway.client.request(method, path)
    assert reply.status_code == 404
    assert instead in (refused(reply)[1] if method != "HEAD" else "")


def test_other_paths_methods_and_bodies_are_refused_in_the_same_envelope(
    gateway: Gateway,
) -> None:
    assert refused(gateway.client.get("/api/chat"))[0] == 405
    assert refused(gateway.client.get("/api/none"))[0] == 404
    form = gateway.client.post("/api/chat", content=b"a=1", headers={"content-type": "text/plain"})
    assert refused(form)[0] == 415
    unknown = gateway.client.post("/api/chat", json={"model": "llama", "messages": USER})
    assert refused(unknown)[0] == 404


def test_a_stream_that_breaks_ends_with_an_error_in_a_line(slow_gateway: Gateway) -> None:
    """The deadline passes while the answer is written."""
    body = {"model": MODEL, "messages": USER, "options": {"num_predict": 8000}}
    reply = begun_before_its_deadline(slow_gateway, {}, "/api/chat", body)
    assert reply.headers["x-request-id"]
    last = [json.loads(each) for each in reply.iter_lines()][-1]
    assert last.keys() == {"error"}


def test_a_client_that_leaves_ends_its_answer(slow_gateway: Gateway) -> None:
    output = [{"role": "user", "content": "A question whose answer nobody drafts."}]
    body = {"model": MODEL, "messages": output, "options": {"num_predict": 4000}}

    def num_running() -> float:
        return slow_gateway.metric("headwater_num_requests_running")

    with slow_gateway.client.stream("POST", "/api/chat", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        slow_gateway.wait_until(lambda: num_running() == 1)
    slow_gateway.wait_until(lambda: num_running() == 0)


def test_a_request_is_explained_by_its_id(thinker: Gateway) -> None:
    body = {"messages": USER, "options": SHORT} | QUIET
    reply = thinker.client.post("/api/chat", json=body)
    known = thinker.client.get(f"/v1/requests/{reply.headers['x-request-id']}/explain")
    assert known.status_code == 200, known.text
