"""Tools and calls in prompts: for templates that know them, and for those that do not."""

from pathlib import Path

import pytest

from pdserve.core.errors import InvalidRequestError
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.conversation import ChatMessage, plain_messages, template_messages
from pdserve.text.tools import Tool, ToolCall, format_of_template
from tests.text.tiny_models import byte_level, save

KNOWS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call>{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}>{% endfor %}{% endfor %}"
)
PLAIN = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
TOOL = Tool(name="f", description=None, parameters={"type": "object"})
CALL = ToolCall(call_id="c1", name="f", arguments='{"x": "é"}')
TALK = (
    ChatMessage(role="user", content="Hi"),
    ChatMessage(role="assistant", content="", tool_calls=(CALL, CALL)),
    ChatMessage(role="tool", content="one", tool_call_id="c1"),
    ChatMessage(role="tool", content="two", tool_call_id="c1"),
    ChatMessage(role="developer", content="Be brief."),
)


def template(directory: Path, source: str) -> ChatTemplate:
    return ChatTemplate(save(directory, byte_level(), chat_template=source))


def test_a_template_that_knows_tools_gets_them_as_they_are(tmp_path: Path) -> None:
    known = template(tmp_path, KNOWS)
    assert known.with_tools == KNOWS
    text = known.render(template_messages(TALK), tools=[TOOL.as_json()])
    assert text.startswith('<tools>{"type": "function", "function": {"name": "f", "parameters"')
    assert text.endswith(
        '[user]Hi[assistant]<f {"x": "é"}><f {"x": "é"}>[tool]one[tool]two[system]Be brief.'
    )


def test_one_that_does_not_is_told_in_words_of_hermes(tmp_path: Path) -> None:
    plain = template(tmp_path, PLAIN)
    assert plain.with_tools is None
    text = plain.render(plain_messages(TALK, [TOOL]))
    assert text.startswith("[system]# Tools")
    assert '{"type": "function", "function": {"name": "f", "parameters"' in text
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    results = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in ("one", "two"))
    assert text.endswith(f"[user]Hi[assistant]{call}\n{call}[user]{results}[system]Be brief.")


def test_the_tools_go_with_the_systems_message_that_there_is() -> None:
    first, second = plain_messages(
        [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="Hi")],
        [TOOL],
    )
    assert first["content"].startswith("Be kind.\n\n# Tools")
    assert second == {"role": "user", "content": "Hi"}


def test_without_tools_and_calls_messages_are_what_they_were() -> None:
    talk = [ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="")]
    assert plain_messages(talk, []) == template_messages(talk)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("... {{- '\\n</tool_call>' }} <tool_call> ...", "hermes"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ('<|python_tag|>{"name"', "llama3_json"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral"),
        ("[AVAILABLE_TOOLS]", None),
    ],
)
def test_the_template_tells_how_calls_are_written(source: str, name: str | None) -> None:
    found = format_of_template(source)
    assert (found and found.name) == name


@pytest.mark.parametrize("arguments", ["[1]", "{", "[" * 5000])
@pytest.mark.parametrize("write", [template_messages, lambda talk: plain_messages(talk, [])])
def test_arguments_that_are_no_object_are_named(write, arguments) -> None:
    call = ToolCall(call_id="c", name="f", arguments=arguments)
    talk = [ChatMessage(role="assistant", content="", tool_calls=(call,))]
    where = r"messages\[0\].tool_calls\[0\].function.arguments: "
    with pytest.raises(InvalidRequestError, match=where):
        write(talk)
