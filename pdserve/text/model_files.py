"""The text side of a model directory: ``tokenizer_config.json`` and the chat templates beside it.

Reads files and names what is wrong with them; what the values mean is the readers' business.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.errors import ModelFilesError

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedTokenSpec:
    """A token that ``tokenizer_config.json`` declares beside the vocabulary."""

    token_id: int
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """What ``tokenizer_config.json`` and ``special_tokens_map.json`` say; both may be missing."""

    path: Path
    special_tokens: dict[str, str]  # by name, of NAMED_SPECIAL_TOKENS
    more_special_tokens: tuple[str, ...]
    added_tokens: tuple[AddedTokenSpec, ...]  # by id
    chat_templates: dict[str, str]  # by name; "default" is the usual one


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Raises ModelFilesError naming the file and the key that is wrong."""
    path = directory / "tokenizer_config.json"
    config = parse_json(read_text(path), path) if path.exists() else {}
    specials_path = directory / "special_tokens_map.json"
    specials = parse_json(read_text(specials_path), specials_path) if specials_path.exists() else {}
    try:
        return TokenizerConfig(
            path=path,
            special_tokens=_special_tokens(specials | {k: v for k, v in config.items() if v}),
            more_special_tokens=_more_special_tokens(config),
            added_tokens=_added_tokens(config.get("added_tokens_decoder") or {}),
            chat_templates=_chat_templates(config.get("chat_template"))
            | _template_files(directory),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFilesError(f"{path}: bad or missing key: {error}") from error


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """The JSON object in a file's text. Raises ModelFilesError naming the file."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelFilesError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    """A file's text. Raises ModelFilesError naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: cannot be read: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: _content(config[name]) for name in NAMED_SPECIAL_TOKENS if config.get(name)}


def _more_special_tokens(config: dict[str, Any]) -> tuple[str, ...]:
    values = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    return tuple(_content(v) for v in (values.values() if isinstance(values, dict) else values))


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added_tokens(declared: dict[str, dict[str, Any]]) -> tuple[AddedTokenSpec, ...]:
    tokens = [
        AddedTokenSpec(
            token_id=int(token_id),
            content=str(token["content"]),
            special=bool(token.get("special", False)),
            single_word=bool(token.get("single_word", False)),
            lstrip=bool(token.get("lstrip", False)),
            rstrip=bool(token.get("rstrip", False)),
            normalized=bool(token.get("normalized", not token.get("special", False))),
        )
        for token_id, token in declared.items()
    ]
    return tuple(sorted(tokens, key=lambda token: token.token_id))


def _chat_templates(value: str | list[dict[str, str]] | None) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    return {str(entry["name"]): str(entry["template"]) for entry in value}


def _template_files(directory: Path) -> dict[str, str]:
    """Template files win over those in the configuration, as in Hugging Face's libraries."""
    templates = {
        path.stem: read_text(path)
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    default = directory / "chat_template.jinja"
    return templates | ({"default": read_text(default)} if default.exists() else {})
