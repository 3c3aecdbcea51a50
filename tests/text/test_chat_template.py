"""Chat templates: what they are given, what they refuse, and that Hugging Face renders the same."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.text.chat_template import ChatTemplate
from tests.text.tiny_models import byte_level, save

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

ALTERNATING = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

EVERYTHING = """{%- set ns = namespace(seen=0) %}
{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
{{ loop.index }}/{{ loop.length }} {{ message | tojson }} {{ message.content | trim | upper }}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{ ns.seen }} {{ flavour | default('plain') }}
{{ add_generation_prompt }} {{ pad_token is defined }}
{{ strftime_now('%Y') | length }}"""

CONVERSATION = [
    {"role": "user", "content": '  <b>Hé</b> & "ho" '},
    {"role": "assistant", "content": "ça va 👍🏽"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "unseen"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def template(directory, source=None, **config) -> ChatTemplate:
    save(directory, byte_level(), bos_token="<|start|>", eos_token="<|end|>", **config)
    if source is not None:
        (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
    return ChatTemplate(directory)


@pytest.mark.parametrize("source", [CHATML, ALTERNATING, EVERYTHING])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_hugging_face(tmp_path, source, prompt, tools):
    ours = template(tmp_path, source)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        CONVERSATION, tools=tools, add_generation_prompt=prompt, tokenize=False, flavour="sour"
    )
    extra = {"flavour": "sour"}
    rendered = ours.render(CONVERSATION, add_generation_prompt=prompt, tools=tools, extra=extra)
    assert rendered == expected


def test_a_template_file_wins_over_the_configuration(tmp_path):
    chat = template(tmp_path, "from the file", chat_template="from the configuration")
    assert chat.render(CONVERSATION) == "from the file"


def test_the_configuration_may_hold_one_template_or_several(tmp_path):
    one = template(tmp_path / "one", chat_template="only")
    assert one.render(CONVERSATION, tools=TOOLS) == "only"
    several = template(
        tmp_path / "several",
        chat_template=[
            {"name": "default", "template": "usual"},
            {"name": "tool_use", "template": "with tools"},
        ],
    )
    assert several.render(CONVERSATION) == "usual"
    assert several.render(CONVERSATION, tools=TOOLS) == "with tools"


def test_a_model_without_a_template_says_so(tmp_path):
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        template(tmp_path).render(CONVERSATION)
    assert caught.value.field == "messages"


def test_text_parts_become_text(tmp_path):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = template(tmp_path, CHATML)
    rendered = chat.render([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert rendered == "<|im_start|>user\none\ntwo<|im_end|>\n"


def test_empty_fields_look_absent_to_the_template(tmp_path):
    chat = template(tmp_path, "{{ messages[0].content is defined }} {{ messages[0] | length }}")
    assert chat.render([{"role": "assistant", "content": None, "tool_calls": None}]) == "False 1"


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        ("hello", "messages[0]", "must be an object"),
        ({"role": "user", "content": 5}, "messages[0].content", "string or a list"),
        ({"role": "user", "content": b"x"}, "messages[0].content", "string or a list"),
        ({"role": "user", "content": ["x"]}, "messages[0].content", "a part must be"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content", "a part must be"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content",
            "parts of type 'image_url' are not supported",
        ),
        ({"role": "user"}, "messages", "the chat template says"),
        ({"content": "x"}, "messages", "the chat template says"),
        ({"role": 5, "content": "x"}, "messages", "the chat template says"),
    ],
)
def test_what_a_message_lacks_is_named(tmp_path, message, field, problem):
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        template(tmp_path, CHATML).render([message])
    assert caught.value.field == field


def test_the_template_s_own_refusal_reaches_the_client(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"messages: .*roles must alternate"):
        template(tmp_path, ALTERNATING).render(CONVERSATION[1:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
        "{{ 1 // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_stays_in_its_sandbox(tmp_path, source):
    with pytest.raises(InvalidRequestError, match="messages"):
        template(tmp_path, source).render(CONVERSATION)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_with_a_meaning_cannot_be_set_from_outside(tmp_path, name):
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs: '{name}'"):
        template(tmp_path, CHATML).render(CONVERSATION, extra={name: []})


def test_a_damaged_template_is_named_at_start(tmp_path):
    with pytest.raises(ModelFilesError, match="the chat template is damaged"):
        template(tmp_path, "{% for %}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFilesError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize("value", [5, [{"name": "x"}], {"default": "x"}])
def test_a_template_of_another_type_is_named(tmp_path, value):
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json"):
        ChatTemplate(tmp_path)
