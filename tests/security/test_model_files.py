"""Model files: safetensors of the directory itself, nothing that runs code, nothing elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import check_weights_are_there
from pdserve.engine.weights import SafetensorsWeights


def load(directory: Path) -> object:
    return SafetensorsWeights(directory, dtype=torch.float32, device=torch.device("cpu"))


BOTH: list[Callable[[Path], object]] = [check_weights_are_there, load]


class Bomb:
    """Tells whether it was unpickled."""

    went_off = False

    def __reduce__(self):
        return (go_off, ())


def go_off() -> None:
    Bomb.went_off = True


@pytest.mark.parametrize("read", BOTH)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.ckpt"])
def test_files_that_may_run_code_are_refused_by_name_and_not_opened(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    torch.save({"weight": Bomb()}, tmp_path / name)
    with pytest.raises(ModelFilesError, match=rf"{name} will not do: other formats may run code"):
        read(tmp_path)
    assert not Bomb.went_off


@pytest.mark.parametrize("read", BOTH)
@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00001.bin",
        "model.pt",
        "../elsewhere/model.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "..",
    ],
)
def test_an_index_that_names_other_files_is_refused_by_name(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    (tmp_path / Path(name).name).write_bytes(b"") if name[0] not in "./" else None
    with pytest.raises(ModelFilesError, match="is no name of a safetensors file beside it"):
        read(tmp_path)
