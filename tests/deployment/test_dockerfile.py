"""The image can be made from what is here, and what it runs is there.

No image is built: scripts/build_image.sh does that, in minutes and with a network. The lines are
checked for what they name.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.commands import check_command

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
TEXT = DOCKERFILE.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [
    line for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line and not line.startswith("#")
]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.split()[0] == name]


COPIED = [source for line in instructions("COPY") for source in line.split()[:-1]]


def ignored() -> tuple[set[str], list[str]]:
    """What .dockerignore lets through, and what it takes away inside of that."""
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    return {line[1:] for line in lines if line.startswith("!")}, [
        line for line in lines[1:] if not line.startswith("!")
    ]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_linter_has_nothing_to_say() -> None:
    assert HADOLINT is not None
    done = subprocess.run(
        [HADOLINT, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("source", COPIED)
def test_what_is_copied_is_there_and_not_ignored(source: str) -> None:
    assert (ROOT / source).exists()
    assert source in ignored()[0]


def test_nothing_else_is_let_through() -> None:
    let_through, taken_away = ignored()
    assert let_through == set(COPIED)
    assert taken_away == ["**/__pycache__", "**/*.so"]


def test_all_packages_of_the_wheel_are_copied() -> None:
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(COPIED)


@pytest.mark.parametrize(
    "text", ["Dockerfile", "scripts/build_image.sh", "examples/README.md", "docs/deployment.md"]
)
def test_arguments_for_the_build_are_declared(text: str) -> None:
    given = set(re.findall(r"--build-arg (\w+)=", (ROOT / text).read_text()))
    assert given <= {argument.partition("=")[0] for argument in instructions("ARG")}


def test_the_extras_that_are_asked_for_exist() -> None:
    asked = re.findall(r"EXTRAS=([\w,]+)", TEXT)
    assert asked
    for extras in asked:
        assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_what_has_pre_releases_alone_names_one() -> None:
    (gpu,) = PROJECT["project"]["optional-dependencies"]["gpu"]
    assert Requirement(gpu).specifier.prereleases  # else pip takes none of them


def test_what_torch_wants_another_release_of_is_not_pinned() -> None:
    unpinned = re.findall(r"-e '\^([\w-]+)=='", instructions("RUN")[1])
    assert unpinned == ["torch", "setuptools"]


def test_the_torch_that_was_asked_for_is_not_replaced() -> None:
    steps = instructions("RUN")[1].split("&&")
    (torch,) = (i for i, step in enumerate(steps) if '"${TORCH}"' in step)
    assert "grep '^torch==' >> constraints.txt" in steps[torch + 1]
    for step in steps[torch + 1 :] + instructions("RUN")[2].split("&&"):
        assert "pip install" not in step or "-c constraints.txt" in step


def test_what_is_installed_before_our_code_is_all_that_is_asked_for() -> None:
    (program,) = re.findall(r"python3 -c '([^']+)' \"\$\{EXTRAS\}\" > needed.txt", "\n".join(LINES))
    done = subprocess.run(
        [sys.executable, "-c", program, "hub,otel,"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    project = PROJECT["project"]
    extras = [project["optional-dependencies"][name] for name in ("hub", "otel")]
    assert done.stdout.splitlines() == [*project["dependencies"], *extras[0], *extras[1]]


def test_torch_is_the_release_of_the_lock() -> None:
    (pinned,) = re.findall(r"^torch==.+$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert f"TORCH={pinned}" in instructions("ARG")


def test_what_it_runs_is_taken_by_pdserve() -> None:
    entry, command = (json.loads(instructions(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert entry[:2] == ["/usr/bin/tini", "--"]
    check_command(entry[2:] + command)
    check_command(json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2]))


def test_it_ends_before_docker_kills_it() -> None:
    words = json.loads(instructions("CMD")[0])
    grace_s = float(words[words.index("--grace-s") + 1])
    assert 0 < grace_s <= 6  # of 10 s; to end the processes took 3 s on two slow cores


def test_the_ports_are_the_routers() -> None:
    assert instructions("EXPOSE") == ["8000 8001"]


def test_it_does_not_run_as_root() -> None:
    assert instructions("USER")[-1] == "1000"
