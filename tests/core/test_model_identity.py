"""A model directory is known again wherever it lies, and another one is told apart by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import (
    MAX_SAMPLES,
    check_identity,
    check_weights_are_there,
    identity_of,
    weight_names,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Change = Callable[[Path], object]


def save_shard(path: Path, *, scale: float = 1.0, last: float = 0.0) -> None:
    tensors = {f"{path.stem}.{i}": torch.full((64, 64), scale * i) for i in range(4)}
    tensors[f"{path.stem}.3"] += last
    save_file(tensors, path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 2}')
    for name in SHARDS:
        save_shard(directory / name)
    index = {"weight_map": {f"{Path(name).stem}.{i}": name for name in SHARDS for i in range(4)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    """The same model as it lies on another host."""
    return Path(shutil.copytree(model, tmp_path / "other"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_copy_has_the_same_identity_whatever_lies_beside_it(model: Path, other: Path) -> None:
    (other / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 8}')
    (other / "consolidated.safetensors").write_bytes(b"the same once more, for other programs")
    (other / "README.md").write_text("words")
    assert identity_of(other) == identity_of(model)
    check_identity(other, identity_of(model))


CHANGES: dict[str, tuple[Change, str]] = {
    "config": (
        lambda d: (d / "config.json").write_text('{"hidden_size": 9}'),
        "config.json has other content",
    ),
    "missing": (lambda d: (d / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing"),
    "cut short": (lambda d: truncate(d / SHARDS[0]), rf"{SHARDS[0]} has [\d,]+ bytes, expected"),
    "other weights": (
        lambda d: save_shard(d / SHARDS[0], scale=2.0),
        f"{SHARDS[0]} has other weights",
    ),
    "one tensor of them": (
        lambda d: save_shard(d / SHARDS[1], last=0.5),
        f"{SHARDS[1]} has other weights",
    ),
    "no file of weights": (
        lambda d: (d / SHARDS[0]).write_bytes(b"x"),
        rf"{SHARDS[0]} has 1 bytes, expected",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_refused_by_path_fingerprints_and_file(
    change: str, model: Path, other: Path
) -> None:
    do, says = CHANGES[change]
    expected = identity_of(model)
    do(other)
    with pytest.raises(ModelFilesError) as error:
        check_identity(other, expected)
    message = str(error.value)
    assert message.startswith(f"{other}: fingerprint ")
    assert f"expected {expected.fingerprint}" in message
    assert expected.fingerprint != message.split()[2].strip(",")
    assert error.match(says)


def test_all_that_differs_is_named(model: Path, other: Path) -> None:
    for name in SHARDS:
        truncate(other / name)
    with pytest.raises(ModelFilesError, match=rf"{SHARDS[0]} has .*; {SHARDS[1]} has "):
        check_identity(other, identity_of(model))


def test_a_directory_that_is_not_there_is_refused_by_its_path(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=f"{tmp_path}/none: no such directory"):
        check_identity(tmp_path / "none", identity_of(model))


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\0" * 3000])
def test_what_is_no_file_of_weights_has_an_identity_all_the_same(
    model: Path, content: bytes
) -> None:
    (model / SHARDS[0]).write_bytes(content)
    assert identity_of(model).weights[0].size_bytes == len(content)


def test_very_many_tensors_are_sampled_all_over_the_file(model: Path, other: Path) -> None:
    for directory, last in ((model, 0.0), (other, 1.0)):
        tensors = {f"t{i}": torch.zeros(64) for i in range(3 * MAX_SAMPLES)}
        tensors |= {f"t{i}": torch.full((64,), last) for i in range(9, 3 * MAX_SAMPLES, 10)}
        save_file(tensors, directory / SHARDS[0])
    with pytest.raises(ModelFilesError, match="other weights"):
        check_identity(other, identity_of(model))


# ---- what a directory should hold -----------------------------------------------------------


def test_weights_that_the_index_names_have_to_be_there(model: Path) -> None:
    check_weights_are_there(model)
    (model / SHARDS[1]).unlink()
    with pytest.raises(ModelFilesError, match=rf"{SHARDS[1]}: no such file, but .*index"):
        check_weights_are_there(model)


def test_a_directory_without_weights_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"neither model\.safetensors nor .*index"):
        check_weights_are_there(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"t": "../x.safetensors"}}', "no name of a safetensors file beside it"),
        ('{"weight_map": {"t": "/x.safetensors"}}', "no name of a safetensors file beside it"),
        ('{"weight_map": {"t": ".."}}', "no name of a safetensors file beside it"),
        ('{"weight_map": {"t": "model.bin"}}', "no name of a safetensors file beside it"),
    ],
)
def test_a_bad_index_is_named(index: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFilesError, match=rf"index\.json: .*{says}"):
        weight_names(tmp_path)
