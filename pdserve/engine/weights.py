"""Where weights come from: a Hugging Face directory, or a generator of random ones.

Layers ask for their share by name while they are made, so each rank reads only its own rows or
columns. Knows files and tensors; which tensors a model has is the model's business.
"""

import hashlib
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import INDEX_FILE, SINGLE_FILE, names_of_index, no_weights

NUM_SHOWN = 5  # names in an error


class Weights(Protocol):
    """A source of named tensors. ``take`` gives each name once; ``finish`` ends the loading."""

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """The tensor of that name, or only some ``rows`` (dimension 0) or ``columns`` (dimension
        1).

        ``shape`` is that of the whole tensor. Raises ModelFilesError where it is missing or
        another.
        """

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Close the files. Raises ModelFilesError where others than ``ignored`` were not taken."""


class SafetensorsWeights:
    """The ``*.safetensors`` of a Hugging Face directory: one file, or several with an index."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Path] = _files_by_tensor(directory)
        self._directory = directory
        self._open: dict[Path, safe_open] = {}
        self._taken: set[str] = set()

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        path = self._files.get(name)
        if path is None:
            raise ModelFilesError(f"{self._directory}: tensor {name} is missing")
        self._taken.add(name)
        try:
            part = self._file(path).get_slice(name)  # type: ignore[no-untyped-call]
            found = tuple(part.get_shape())
            if found != shape:
                raise ModelFilesError(f"{path}: tensor {name} has shape {found}, expected {shape}")
            tensor: Tensor = part[_cut(shape, rows, columns)]
        except SafetensorError as error:
            raise ModelFilesError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor.to(device=self._device, dtype=self._dtype)

    def finish(self, ignored: Collection[str] = ()) -> None:
        self._open.clear()
        unexpected = sorted(self._files.keys() - self._taken - set(ignored))
        # Old checkpoints carry the rotary frequencies, which are computed from the config.
        unexpected = [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
        if unexpected:
            shown = ", ".join(unexpected[:NUM_SHOWN]) + (
                " …" if len(unexpected) > NUM_SHOWN else ""
            )
            raise ModelFilesError(
                f"{self._files[unexpected[0]]}: {len(unexpected)} unexpected tensors: {shown}"
            )

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelFilesError(f"{path}: not a whole safetensors file: {error}") from error
        return self._open[path]


class DummyWeights:
    """Random weights for a shape whose real ones are not at hand.

    Each whole tensor is drawn from a seed of its name and then cut, so that every TP size holds the
    same model. Scales keep activations and logits around one: matrices by their fan-in, norms at
    one.
    """

    def __init__(self, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        if len(shape) == 1 and name.endswith("norm.weight"):
            whole = torch.ones(shape, dtype=self._dtype, device=self._device)
        else:
            digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
            generator = torch.Generator(self._device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            whole = torch.empty(shape, dtype=self._dtype, device=self._device)
            whole.normal_(0.0, 1 / math.sqrt(shape[-1]), generator=generator)
        cut = _cut(shape, rows, columns)
        # A copy, so that the whole tensor can go.
        return whole[cut].clone() if rows is not None or columns is not None else whole

    def finish(self, ignored: Collection[str] = ()) -> None:
        pass


def _cut(shape: tuple[int, ...], rows: range | None, columns: range | None) -> tuple[slice, ...]:
    """Slices of the whole tensor; each dimension keeps its full range where nothing is said."""
    wanted = (rows, columns)[: len(shape)]
    return tuple(
        slice(0, size) if part is None else slice(part.start, part.stop)
        for size, part in zip(shape, wanted, strict=False)
    )


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        return _tensors_of(directory / SINGLE_FILE)
    names_of_index(index)  # refuses what is no safetensors file of this directory
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): directory / str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelFilesError(f"{index}: not an index of safetensors files: {error!r}") from error
    for path in sorted(set(files.values())):
        if not path.exists():
            raise ModelFilesError(f"{path}: no such file, but {index.name} names it")
    return files


def _tensors_of(path: Path) -> dict[str, Path]:
    if not path.exists():
        raise no_weights(path.parent)
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{path}: not a whole safetensors file: {error}") from error
