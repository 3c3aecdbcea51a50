"""Models of a Hugging Face hub in the user's cache: fetched once, whole or not at all.

    CACHE/models/hub/ORG--NAME/COMMIT/            a model directory; there only when whole
    CACHE/models/hub/ORG--NAME/COMMIT/.complete   the size of each of its files
    CACHE/models/hub/ORG--NAME/REVISION.ref       which commit a branch or tag was when last asked
    CACHE/models/hub/ORG--NAME/.COMMIT.part/      a download under way, or interrupted: gone on with
    CACHE/models/hub/ORG--NAME/.lock              held while the above change

A model that is there is used as it is, without a network: a branch that has moved on is followed
when it is fetched anew (``refresh``), never by a restart.
"""

import hashlib
import json
import shutil
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import INDEX_FILE, names_of_index
from pdserve.models.hub_repo import Hub, HubFile, HubModel, HubRepo, small_files, weight_files

MARKER = ".complete"
LOCK_TIMEOUT_S = 6 * 3600.0  # another process may be downloading hundreds of gigabytes


@dataclass(frozen=True, slots=True)
class HubCache:
    """The folders in the module's docstring, below ``root``."""

    root: Path
    connect: Callable[[], Hub]  # asked only where something is missing

    def fetch(self, model: HubModel, *, refresh: bool, progress: bool) -> Path:
        """The directory of ``model``, downloaded if it is not there. Raises ModelFilesError."""
        home = self.root / "models" / "hub" / model.repo_id.replace("/", "--")
        if not (refresh and not model.is_pinned) and (there := _there(home, model)):
            return there
        try:
            home.mkdir(parents=True, exist_ok=True)
            with FileLock(home / ".lock", timeout=LOCK_TIMEOUT_S):
                return self._fetch_alone(home, model, refresh=refresh, progress=progress)
        except Timeout as error:
            raise ModelFilesError(
                f"{model}: another process has held {home / '.lock'} for {LOCK_TIMEOUT_S:.0f} s"
            ) from error
        except OSError as error:  # no space, no permission: the message names the path
            raise ModelFilesError(f"{model} cannot be put into the cache: {error}") from error

    def _fetch_alone(self, home: Path, model: HubModel, *, refresh: bool, progress: bool) -> Path:
        if not refresh and (there := _there(home, model)):  # another process has fetched it
            return there
        hub = self.connect()
        repo = hub.look_up(model)
        directory = home / repo.commit
        if not is_whole(directory):
            _Download(hub, model, repo, home / f".{repo.commit}.part", progress=progress).run()
            if directory.exists():  # it was whole once
                shutil.rmtree(directory)
            (home / f".{repo.commit}.part").rename(directory)
            for abandoned in home.glob(".*.part"):
                shutil.rmtree(abandoned)
        if not model.is_pinned:
            _ref(home, model).write_text(repo.commit + "\n", encoding="utf-8")
        return directory


@dataclass(frozen=True, slots=True)
class _Download:
    """One repository at one commit on its way into ``part``."""

    hub: Hub
    model: HubModel
    repo: HubRepo
    part: Path
    progress: bool

    def run(self) -> None:
        small = small_files(self.model, self.repo)
        self.part.mkdir(exist_ok=True)
        for file in small:
            self._bring(file)
        index = self.part / INDEX_FILE
        in_index = names_of_index(index) if any(f.name == INDEX_FILE for f in small) else None
        weights = weight_files(self.model, self.repo, in_index)
        self._check_room(weights)
        for file in weights:
            self._bring(file)
        _remove_others(self.part, [*small, *weights])
        _write_marker(self.part, [*small, *weights])

    def _check_room(self, weights: Sequence[HubFile]) -> None:
        needed = sum(f.size_bytes for f in weights if not _has_size(self.part, f))
        free = shutil.disk_usage(self.part).free
        if self.progress and needed:
            tqdm.write(
                f"downloading {self.model}: {len(weights)} files of weights, {needed / 1e9:.1f} GB",
                file=sys.stderr,
            )
        if needed > free:
            raise ModelFilesError(
                f"{self.model}: its weights take {needed / 1e9:,.1f} GB more, but "
                f"{self.part.parent} has {free / 1e9:,.1f} GB free; PDSERVE_CACHE names another "
                "place"
            )

    def _bring(self, file: HubFile) -> None:
        """Download one file, unless an interrupted run had it whole. Raises ModelFilesError."""
        if not _has_size(self.part, file):
            self.hub.download(self.model, self.repo.commit, file.name, str(self.part))
        path = self.part / file.name
        size = path.stat().st_size if path.exists() else 0
        if size != file.size_bytes:
            raise ModelFilesError(
                f"{self.model}: {file.name}: {size:,} of {file.size_bytes:,} bytes came; try "
                "again: files that are whole are kept"
            )
        if file.sha256 is not None and (got := _sha256(path)) != file.sha256:
            path.unlink()
            raise ModelFilesError(
                f"{self.model}: {file.name}: sha256 is {got}, expected {file.sha256}; what came is "
                "damaged and was removed"
            )


def whole_models(root: Path) -> list[Path]:
    """The directories of all models of hubs that are in the cache below ``root``."""
    markers = (root / "models" / "hub").glob("*/*/" + MARKER)
    return sorted(marker.parent for marker in markers if is_whole(marker.parent))


def is_whole(directory: Path) -> bool:
    """Whether a directory still has all that was fetched, by name and size."""
    try:
        sizes = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _there(home: Path, model: HubModel) -> Path | None:
    """The whole model of an earlier fetch."""
    try:
        commit = model.revision if model.is_pinned else _ref(home, model).read_text().strip()
    except OSError:
        return None
    directory = home / commit
    return directory if commit and is_whole(directory) else None


def _ref(home: Path, model: HubModel) -> Path:
    return home / f"{urllib.parse.quote(model.revision, safe='')}.ref"


def _has_size(folder: Path, file: HubFile) -> bool:
    path = folder / file.name
    return path.exists() and path.stat().st_size == file.size_bytes


def _remove_others(part: Path, files: Sequence[HubFile]) -> None:
    """What the hub's library keeps beside them, to go on after an interruption."""
    kept = {Path(file.name).parts[0] for file in files}
    for path in part.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_marker(directory: Path, files: Sequence[HubFile]) -> None:
    sizes = {file.name: file.size_bytes for file in files}
    text = json.dumps({"files": sizes}, indent=2) + "\n"
    (directory / MARKER).write_text(text, encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
