"""Chat messages to the text of a prompt, by the model's own template.

Templates are Jinja programs that come with the model's files; they run in Jinja's sandbox, with
what Hugging Face's libraries offer them: ``raise_exception``, ``tojson``, ``strftime_now``, loop
controls, ``generation`` blocks and the special tokens by name. Which roles may follow each other is
the template's to say.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.text.model_files import read_tokenizer_config

Message = Mapping[str, Any]

# What a template's expressions can raise on messages that it did not expect.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """The chat templates of a model directory; a model may have none."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelFilesError naming the directory where a template is no valid Jinja."""
        config = read_tokenizer_config(directory)
        environment = _environment()
        self._special_tokens = config.special_tokens
        try:
            self._templates = {
                name: environment.from_string(source)
                for name, source in config.chat_templates.items()
            }
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"{directory}: the chat template is damaged: {error}") from error
        # The text of the template that writes tools into prompts; None where none does.
        self.with_tools = _source_with_tools(config.chat_templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; it holds its special tokens, so encode it without adding them.

        ``extra`` are further variables for the template. Raises InvalidRequestError naming the
        field when the model has no template or the template refuses the messages.
        """
        for name in sorted(_OWN_NAMES & set(extra or {})):
            raise InvalidRequestError("chat_template_kwargs", f"{name!r} cannot be set here")
        template = self._template(with_tools=tools is not None)
        variables = {
            **self._special_tokens,
            **(extra or {}),
            "messages": [_plain(i, message) for i, message in enumerate(messages)],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except _RENDER_ERRORS as error:
            raise InvalidRequestError("messages", f"the chat template says: {error}") from error

    def _template(self, *, with_tools: bool) -> jinja2.Template:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise InvalidRequestError(
            "messages", "this model has no chat template; use the completions API instead"
        )


def _source_with_tools(sources: Mapping[str, str]) -> str | None:
    for name in ("tool_use", "default"):
        source = sources.get(name)
        wanted = meta.find_undeclared_variables(_environment().parse(source or ""))
        if source is not None and "tools" in wanted:
            return source
    return None


def _plain(index: int, message: Message) -> dict[str, Any]:
    """The message without empty fields (templates test for presence), its content as text."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"messages[{index}]", "must be an object")
    plain = {name: value for name, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _text(index, plain["content"])
    return plain


def _text(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    field = f"messages[{index}].content"
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(field, "must be a string or a list of text parts")
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind != "text":
                raise InvalidRequestError(field, f"parts of type {kind[:40]!r} are not supported")
            case _:
                raise InvalidRequestError(field, 'a part must be {"type": "text", "text": "…"}')
    return "\n".join(texts)


class _GenerationBlocks(Extension):
    """``{% generation %} … {% endgeneration %}`` (marks answers for training) is its content."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - this is how Jinja asks for them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
