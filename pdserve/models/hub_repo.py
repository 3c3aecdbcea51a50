"""A model on a Hugging Face hub as plain values: how it is named, and which of its files we take.

Only safetensors, the configuration and what the tokenizer needs; never what is run or unpickled.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import CONFIG_FILE, INDEX_FILE, SINGLE_FILE

PREFIX = "hf:"
DEFAULT_REVISION = "main"
TOKENIZER_FILE = "tokenizer.json"
NEEDED = (CONFIG_FILE, TOKENIZER_FILE)
OPTIONAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_TEMPLATES = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_SHOWN = 8  # file names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """Which model, and which state of it: a branch, a tag or a commit."""

    repo_id: str  # organisation/name
    revision: str = DEFAULT_REVISION

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never becomes another."""
        return is_commit(self.revision)

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo_id}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository."""

    name: str
    size_bytes: int
    sha256: str | None  # the hub knows it of large files


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """What a repository holds at one commit."""

    commit: str
    files: tuple[HubFile, ...]

    def named(self, names: Sequence[str]) -> tuple[HubFile, ...]:
        """Those files, in this order, as far as they are there."""
        by_name = {file.name: file for file in self.files}
        return tuple(by_name[name] for name in names if name in by_name)


class Hub(Protocol):
    """Where repositories are. Both raise ModelFilesError."""

    def look_up(self, model: HubModel) -> HubRepo:
        """What the revision is now."""

    def download(self, model: HubModel, commit: str, name: str, folder: str) -> None:
        """Bring one file into ``folder``, whole or not at all."""


def is_commit(revision: str) -> bool:
    """Whether it is a commit's whole name, and with that fit for a folder's."""
    return _COMMIT.fullmatch(revision) is not None


def hub_model(source: str, revision: str | None) -> HubModel | None:
    """The model that ``source`` names (``hf:org/name`` or ``org/name``), if it looks like one.

    Raises ModelFilesError where ``hf:`` is followed by something else.
    """
    repo_id = source.removeprefix(PREFIX)
    if not _REPO_ID.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        if source.startswith(PREFIX):
            raise ModelFilesError(f"model {source!r}: expected {PREFIX}organisation/name")
        return None
    return HubModel(repo_id=repo_id, revision=revision or DEFAULT_REVISION)


def small_files(model: HubModel, repo: HubRepo) -> tuple[HubFile, ...]:
    """All that we take but the weights. Raises ModelFilesError where something is missing."""
    names = {file.name for file in repo.files}
    for name in NEEDED:
        if name not in names:
            raise ModelFilesError(f"{model}: the repository has no {name}{_instead(repo)}")
    if SINGLE_FILE not in names and INDEX_FILE not in names:
        raise ModelFilesError(
            f"{model}: the repository has no safetensors ({SINGLE_FILE} or {INDEX_FILE}), and "
            f"pdserve reads nothing else{_instead(repo)}"
        )
    templates = sorted(name for name in names if _TEMPLATES.fullmatch(name))
    return repo.named([*NEEDED, *OPTIONAL, *templates, INDEX_FILE])


def weight_files(
    model: HubModel, repo: HubRepo, in_index: Sequence[str] | None
) -> tuple[HubFile, ...]:
    """The weights: those that the index names, where there is one."""
    names = [SINGLE_FILE] if in_index is None else list(in_index)
    found = repo.named(names)
    if missing := set(names) - {file.name for file in found}:
        raise ModelFilesError(
            f"{model}: the repository has no {min(missing)}, but {INDEX_FILE} names it"
        )
    return found


def _instead(repo: HubRepo) -> str:
    names = sorted(file.name for file in repo.files)
    more = ", …" if len(names) > _NUM_SHOWN else ""
    return f"; it has {', '.join(names[:_NUM_SHOWN])}{more}" if names else "; it is empty"
