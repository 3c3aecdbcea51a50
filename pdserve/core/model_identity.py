"""Which model a directory holds, told from little of it, so that hosts can find theirs the same.

    config.json         all of it, whatever the order of its keys
    each weight file    its name, its size, its header, and some bytes of each of its tensors

That reads a few hundred kilobytes of a model of any size. Another model, a fine-tuned one and a
copy that was cut short are told apart; a single flipped bit is not: this is no checksum.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.errors import ModelFilesError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
WHY_NO_OTHERS = "other formats may run code when they are loaded"
NUM_SHOWN = 5
WEIGHTS_SUFFIX = ".safetensors"
SAMPLE_BYTES = 256  # from the middle of a tensor
MAX_SAMPLES = 1024  # of a file
LENGTH_BYTES = 8  # a safetensors file begins with its header's length
LARGEST_HEADER_BYTES = 100 << 20  # of safetensors itself


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """One file. ``digest`` is of what was read of it."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model's configuration and weights, wherever they lie."""

    config_digest: str
    weights: tuple[FileIdentity, ...]

    @property
    def fingerprint(self) -> str:
        """16 hex digits, other ones for another model."""
        digest = hashlib.sha256(self.config_digest.encode())
        for file in self.weights:
            digest.update(f"{file.name}:{file.size_bytes}:{file.digest}".encode())
        return digest.hexdigest()[:16]


def identity_of(directory: Path) -> ModelIdentity:
    """What a directory holds. Weights may be missing. Raises ModelFilesError."""
    return ModelIdentity(
        config_digest=_config_digest(directory / CONFIG_FILE),
        weights=tuple(
            _weight_identity(directory / name)
            for name in weight_names(directory)
            if (directory / name).exists()
        ),
    )


def weight_names(directory: Path) -> tuple[str, ...]:
    """The weight files that a loader reads, those included that are missing but in the index.

    Raises ModelFilesError where the index is none.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return tuple(sorted(path.name for path in directory.glob(f"*{WEIGHTS_SUFFIX}")))
    return names_of_index(index)


def names_of_index(index: Path) -> tuple[str, ...]:
    """The files that an index of weights names. Raises ModelFilesError."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = tuple(sorted({str(file) for file in files}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(f"{index}: not an index of safetensors files: {error!r}") from error
    for name in names:
        if Path(name).name != name or not name.endswith(WEIGHTS_SUFFIX):
            raise ModelFilesError(f"{index}: {name!r} is no name of a safetensors file beside it")
    return names


def check_weights_are_there(directory: Path) -> None:
    """Raises ModelFilesError naming what is missing."""
    if not (directory / INDEX_FILE).exists() and not (directory / SINGLE_FILE).exists():
        raise no_weights(directory)
    for name in weight_names(directory):
        if not (directory / name).exists():
            raise ModelFilesError(f"{directory / name}: no such file, but {INDEX_FILE} names it")


def no_weights(directory: Path) -> ModelFilesError:
    """For a directory without safetensors, naming the files that are there instead."""
    others = sorted(path.name for path in directory.glob("*") if path.suffix in PICKLED)
    problem = f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    if others:
        problem += f"; {', '.join(others[:NUM_SHOWN])} will not do: {WHY_NO_OTHERS}"
    return ModelFilesError(problem)


def check_identity(directory: Path, expected: ModelIdentity) -> None:
    """Raises ModelFilesError with what is wrong where ``directory`` holds something else.

    Only the files in ``expected`` are looked at: others beside them do no harm.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"{directory}: no such directory")
    config_digest = _config_digest(directory / CONFIG_FILE)
    problems = []
    if config_digest != expected.config_digest:
        problems.append(f"{CONFIG_FILE} has other content")
    found = []
    for file in expected.weights:
        path = directory / file.name
        if not path.exists():
            problems.append(f"{file.name} is missing")
            continue
        found.append(_weight_identity(path))
        if problem := _difference(found[-1], file):
            problems.append(problem)
    if problems:
        got = ModelIdentity(config_digest=config_digest, weights=tuple(found)).fingerprint
        raise ModelFilesError(
            f"{directory}: fingerprint {got}, expected {expected.fingerprint}: "
            f"{'; '.join(problems)}"
        )


def _difference(found: FileIdentity, expected: FileIdentity) -> str | None:
    if found.size_bytes != expected.size_bytes:
        return f"{found.name} has {found.size_bytes:,} bytes, expected {expected.size_bytes:,}"
    if found.digest != expected.digest:
        return f"{found.name} has other weights"
    return None


def _config_digest(path: Path) -> str:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: cannot be read as JSON: {error}") from error
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _weight_identity(path: Path) -> FileIdentity:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            header = _header(descriptor, size)
            digest = hashlib.sha256(header)
            for position in _sample_positions(header, size):
                digest.update(os.pread(descriptor, SAMPLE_BYTES, position))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read: {error}") from error
    return FileIdentity(name=path.name, size_bytes=size, digest=digest.hexdigest())


def _header(descriptor: int, size: int) -> bytes:
    """The header, or as much of it as there is: what is wrong with it is the loader's business."""
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    return os.pread(descriptor, min(length, size, LARGEST_HEADER_BYTES), LENGTH_BYTES)


def _sample_positions(header: bytes, size: int) -> Iterator[int]:
    """The middle of each tensor; where there are very many, of some all over the file."""
    try:
        tensors = json.loads(header)
        spans = sorted(
            (int(begin), int(end))
            for begin, end in (
                entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        spans = [(0, size)]
    values_from = LENGTH_BYTES + len(header)
    for begin, end in spans[:: -(-len(spans) // MAX_SAMPLES) or 1]:
        yield max(0, min(values_from + (begin + end) // 2, size - SAMPLE_BYTES))
