from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.services.runtime.errors import BadRequest
from headwater.services.text import chat_template
from headwater.services.text.chat_template import ChatTemplate, ChatTemplateError
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from headwater.services.text.tokenizer_files_error import TokenizerFilesError

HELLO = [{"role": "user", "content": "Hello 1 <b>"}]
TURNS = [*HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": " bye "}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "dé", "parameters": {"type": "object"}},
    }
]
TEMPLATES = {
    "tojson": "{{ tools | tojson(indent=2) }}{{ messages | tojson }}",
    "whitespace": "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}\n  {% endif %}\n"
    "{{ m.content | trim }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ "
    "m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% "
    "endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 "
    "%}{% endfor %}{{ ns.n }}",
    "prompt": "{{ messages[0].content }}{% if add_generation_prompt %}assistant:{% endif %}{{ "
    "kind | default('x') }}",
    "undefined": "{% if documents %}docs{% endif %}{{ nothing }}",
}


def demo_text(model: TextModel, messages: list[dict[str, Any]], **options: Any) -> str:
    assert model.chat_template is not None
    return model.chat_template.render(messages, **options)


def test_the_demo_models_template_renders_as_its_authors_mean_it(demo_model: TextModel) -> None:
    assert demo_text(demo_model, [{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_replaces_the_models_own(demo_model: TextModel) -> None:
    text = demo_text(
        demo_model, [{"role": "system", "content": "Be brief."}], add_generation_prompt=False
    )
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_the_final_message_can_be_left_open(demo_model: TextModel) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two,"}]
    assert demo_text(demo_model, messages, continue_final_message=True).endswith(
        "<|im_start|>assistant\none, two,"
    )


@pytest.mark.parametrize("begun", ["<", "end", "|", "I", "Hello ", "", "\n\n```"])
def test_a_message_that_is_left_open_ends_with_its_content(
    demo_model: TextModel, begun: str
) -> None:
    """The template may write the same letters after the message, such as those of `<|im_end|>`."""
    messages = [{"role": "user", "content": "Write"}, {"role": "assistant", "content": begun}]
    text = demo_text(demo_model, messages, continue_final_message=True)
    assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{begun}")


def test_a_message_that_is_left_open_is_trimmed_as_its_template_does() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}", {}
    )
    begun = [{"role": "assistant", "content": " one, two, "}]
    assert template.render(begun, continue_final_message=True) == "assistant: one, two,"


def test_a_message_that_the_template_does_not_show_cannot_be_left_open() -> None:
    with pytest.raises(BadRequest, match="does not show the last message"):
        ChatTemplate("Hello", {}).render(HELLO, continue_final_message=True)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.filterwarnings("ignore")
def test_a_template_sees_what_transformers_shows_it(name: str) -> None:
    theirs = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
    options = {"tools": TOOLS, "add_generation_prompt": True, "kind": "k", "bos_token": "<s>"}
    rendered, _ = theirs(conversations=[TURNS], chat_template=TEMPLATES[name], **options)
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"}).render(
        TURNS, tools=TOOLS, variables={"kind": "k"}
    )
    assert [ours] == rendered


def test_a_template_may_refuse_and_its_words_reach_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match=r"messages do not fit .*: roles must alternate") as caught:
        template.render(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{{ messages[0].content + 1 }}",
            "{{ messages[9].content.x }}",
            "{{ 1 // 0 }}",
            "{{ nothing.at.all }}",
        ),
        *("{{ messages | dictsort }}", "{{ '{} {}'.format(1) }}"),
    ],
    ids=["type", "index", "division", "undefined", "attribute", "position"],
)
def test_a_template_that_fails_is_the_messages_fault(source: str) -> None:
    with pytest.raises(BadRequest, match="messages do not fit"):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
    ids=["class", "change", "globals"],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(BadRequest, match="messages do not fit"):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for k in range(99999) %}{{ messages }}{% endfor %}{% "
        "endfor %}",
        "{{ range(10 ** 9) | list }}",
    ],
    ids=["nested loops", "long range"],
)
def test_a_template_cannot_go_on_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_LEN", 1 << 20)
    with pytest.raises(BadRequest, match="messages do not fit"):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize(
    "templates",
    [[{"template": "x"}], [{"name": "default"}], ["x"], [{"name": [], "template": "x"}]],
)
def test_templates_without_names_are_refused_unless_a_file_replaces_them(
    templates: list[Any], demo_folder: Path, tmp_path: Path
) -> None:
    for name in ("model.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((demo_folder / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(
        TokenizerFilesError,
        match=r"tokenizer_config\.json cannot be used: its chat_template is a list of",
    ):
        load_text_model(tmp_path, "tiny", ServingChoices())
    (tmp_path / "own.jinja").write_text("own")
    model = load_text_model(
        tmp_path, "tiny", ServingChoices(chat_template=str(tmp_path / "own.jinja"))
    )
    assert model.chat_template is not None
    assert model.chat_template.source == "own"


def test_a_template_that_does_not_parse_names_its_line() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("ok\n{% for %}", {})
