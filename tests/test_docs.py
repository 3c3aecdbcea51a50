"""What the pages tell people to type and to read is there: commands, options, targets, files."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import check_command

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
FOLDERS = "pdserve|router|prefill_node|decode_node|kv_transfer|proto|tests|docs|examples|scripts"
SUFFIXES = "py|md|yaml|yml|proto|json|png|svg|html|c|h|toml|lock"
FILE = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.-]*[\w-]\.(?:{SUFFIXES}))\b(?!/)")
FOLDER = re.compile(rf"`((?:{FOLDERS})(?:/[\w.-]+)*/)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
PROGRAM = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?pdserve\s")
MAKE = re.compile(r"^(?:\$ )?make ([a-z][a-z-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A line that somebody may type."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def code_lines(text: str) -> Iterator[str]:
    """Lines of fenced and of indented blocks, continued ones joined."""
    inside, pending = False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            continue
        if not inside and not line.startswith("    "):
            continue
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        yield pending
        pending = ""


def typed(pattern: re.Pattern[str]) -> list[Typed]:
    return [
        Typed(page=str(page.relative_to(ROOT)), text=line)
        for page in PAGES
        for line in code_lines(page.read_text(encoding="utf-8"))
        if pattern.match(line)
    ]


def words_of(line: str) -> list[str]:
    """Of a shell's line up to a comment, a pipe or another command."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>()")
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    for word in lexer:
        if word[0] in "|&;<>()":
            break
        words.append(word)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return ["pdserve", *words[1:]]


COMMANDS = typed(PROGRAM)


@pytest.mark.parametrize("line", COMMANDS, ids=str)
def test_each_command_is_taken_by_pdserve(line: Typed) -> None:
    check_command(words_of(line.text))


@pytest.mark.parametrize("line", typed(MAKE), ids=str)
def test_each_target_is_in_the_makefile(line: Typed) -> None:
    match = MAKE.match(line.text)
    assert match is not None
    assert match[1] in TARGETS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {*FILE.findall(text), *FOLDER.findall(text)}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    linked = sorted(name for name in LINK.findall(text) if not (page.parent / name).exists())
    assert (missing, linked) == ([], [])


def test_pages_are_read_as_people_read_them() -> None:
    fenced = "```bash\n$ pdserve status --json | head   # x\n```\n"
    lines = list(code_lines(f"{fenced}\n    A=1 .venv/bin/pdserve bench \\\n        serve\n"))
    assert lines == ["$ pdserve status --json | head   # x", "A=1 .venv/bin/pdserve bench serve"]
    assert [words_of(line) for line in lines] == [
        ["pdserve", "status", "--json"],
        ["pdserve", "bench", "serve"],
    ]
    with pytest.raises(AssertionError, match="does not take"):
        check_command(["pdserve", "status", "--no-such-option"])


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 20
