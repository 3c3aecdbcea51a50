"""The C code is compiled once for a machine, and its absence is survived."""

import logging
from pathlib import Path

import pytest

from pdserve.engine.native.library import COMPILER, load_library


def test_it_is_compiled_once_and_then_found(tmp_path: Path) -> None:
    assert load_library(tmp_path / "new", COMPILER) is not None
    (library,) = (tmp_path / "new").iterdir()
    made_ns = library.stat().st_mtime_ns
    assert load_library(tmp_path / "new", COMPILER) is not None
    assert [path.stat().st_mtime_ns for path in (tmp_path / "new").iterdir()] == [made_ns]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "echo"])
def test_without_a_working_compiler_there_is_none_and_the_log_says_so(
    compiler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_library(tmp_path, compiler) is None
    assert "plain torch instead" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert load_library(tmp_path / "file", COMPILER) is None
