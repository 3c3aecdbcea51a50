"""The C code of this folder, compiled for this machine on first use and kept in the user's cache.

Calls through ctypes release the GIL. The code uses OpenMP, bound to the runtime that torch has
loaded, so that both share one pool of threads. Where no compiler works the engine runs on plain
torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

from pdserve.core.environment import cache_dir

logger = logging.getLogger(__name__)

COMPILER = "cc"
# Not -ffast-math: it would make loading the library flush denormals in the whole process.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-Wall",
)
COMPILE_TIMEOUT_S = 300.0


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled library of this process, or None where it cannot be made here."""
    return load_library(cache_dir() / "native", COMPILER)


def load_library(folder: Path, compiler: str) -> ctypes.CDLL | None:
    """Load the library, compiled into ``folder`` if it is not there; None, logged, on failure."""
    try:
        return ctypes.CDLL(str(_compiled(folder, [compiler, *FLAGS])))
    except (OSError, subprocess.SubprocessError) as error:
        details = getattr(error, "stderr", None) or error
        logger.warning("no fast CPU kernels, plain torch instead: %s", details)
        return None


def _compiled(folder: Path, command: list[str]) -> Path:
    """The shared library for exactly these sources, flags, compiler and processor."""
    here = Path(__file__).parent
    sources = sorted(here.glob("*.c"))
    key = " ".join((*command, _version(command[0]), _processor()))
    digest = hashlib.sha256(key.encode())
    for path in (*sources, *sorted(here.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    library = folder / f"pdserve-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        _compile(command, sources, library)
    return library


def _compile(command: list[str], sources: list[Path], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=library.parent, suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        subprocess.run(
            [*command, "-o", name, *map(str, sources), "-Wl,--as-needed", *_openmp_of_torch()],
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        part.chmod(0o755)
        part.replace(library)  # whole or not at all, whoever else compiles at the same time
    finally:
        part.unlink(missing_ok=True)


def _openmp_of_torch() -> list[str]:
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(path) for path in bundled[:1]]


def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=30
    ).stdout


def _processor() -> str:
    """What ``-march=native`` depends on: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))}))
