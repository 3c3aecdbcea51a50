"""The one file that reads the process environment. Everything else takes paths and values as
arguments.
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where pdserve keeps what it can make again: models, run files.

    ``$PDSERVE_CACHE``, else ``$XDG_CACHE_HOME/pdserve``, else ``~/.cache/pdserve``. A variable that
    is set to nothing counts as unset.
    """
    if own := os.environ.get("PDSERVE_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "pdserve"
    return Path.home() / ".cache" / "pdserve"
