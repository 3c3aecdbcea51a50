"""The command line: names, errors and exit statuses; and that it answers at once."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.cluster.run_file import RunRecord, claim

ANY_PORT = ["serve", "--set", "router.http_port=0", "--set", "router.grpc_port=0"]
SLOW_MODULES = ("torch", "ray", "transformers", "grpc", "fastapi")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_option_prints_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "command", [["bench", "serve"], ["bench", "overload"], ["bench", "handoff"]]
)
def test_help_shows_defaults_that_say_something(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--seed SEED of the prompts (default: 0)" in shown
    assert "default: the cluster that runs here" in shown
    assert "default: False" not in shown
    assert "default: None" not in shown


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("pdserve 0.")


@pytest.mark.parametrize("words", [[], ["bench"], ["models"], ["serv"], ["models", "drop"]])
def test_what_is_no_command_is_refused_with_the_known_ones(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == cli.EXIT_WRONG_INPUT
    assert "usage: pdserve" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*name.split(), "--help"])
    assert left.value.code == 0
    assert f"usage: pdserve {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["status"], ["serve", "--help"], ["models", "list"]])
def test_quick_commands_load_nothing_slow(words: list[str]) -> None:
    code = (
        "import sys; from pdserve import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print('loaded', *(m for m in {SLOW_MODULES} if m in sys.modules))"
    )
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded"
    assert time.monotonic() - began_s < 3  # a second on a quiet machine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "missing.yaml"], "missing.yaml: cannot be read"),
        (["serve", "--set", "decode.replicsa=2"], "did you mean decode.replicas?"),
        (["serve", "--set", "model.dtype=float8"], "model.dtype"),
        (
            [*ANY_PORT, "--set", "model.source=no-such"],
            "model.source: got 'no-such', which is neither a directory nor a known name",
        ),
        (["bench", "engine", "--model", "/no/such"], "nor a hub id (organisation/name)\n"),
        (["demo", "--set", "decode.replicas=two"], "decode.replicas: expected a whole number"),
        (["models", "fetch", "gpt-9"], "no model named 'gpt-9'"),
    ],
)
def test_wrong_input_is_named_on_stderr_with_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == cli.EXIT_WRONG_INPUT
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_the_cluster_file_of_the_directory_is_read(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "cluster.yaml").write_text("router: {htp_port: 1}\n")
    assert cli.main(["serve"]) == cli.EXIT_WRONG_INPUT
    assert "router.htp_port: unknown key; did you mean router.http_port?" in capsys.readouterr().err


def test_status_without_a_cluster_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == cli.EXIT_FAILED
    assert "no cluster runs on this machine" in capsys.readouterr().err


def test_status_of_several_clusters_lists_them(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = [claim(cache / "run", name) for name in ("blue", "green")]
    for each in held:
        each.publish(
            RunRecord(
                name=each.name, pid=1, log_dir="l", run_token="t", admin_token="a", leftovers=()
            )
        )
    assert cli.main(["status", "--name", "red"]) == cli.EXIT_WRONG_INPUT
    assert "no cluster named 'red' runs here; there are\n  blue" in capsys.readouterr().err
    assert cli.main(["status"]) == cli.EXIT_WRONG_INPUT
    assert cli.main(["status", "--name", "blue"]) == cli.EXIT_FAILED
    captured = capsys.readouterr()
    assert "choose one by --name:\n  blue  starting\n  green  starting" in captured.err
    assert "'blue' is still starting" in captured.err
    for each in held:
        each.release()
