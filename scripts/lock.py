"""Write what this environment holds into requirements.lock: names and versions, nothing local."""

import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
HEADER = """\
# Every package of the development environment, pinned; `make install` reads this file.
# Made by `make lock` on Python 3.11. torch is the release that development on a CPU uses;
# pyproject.toml says which others will do.
"""
INSTALLERS = {"pip", "wheel"}
PIN = re.compile(r"([A-Za-z0-9_.-]+)==([^+\s]+)")  # a local version such as +cpu is left out


def main() -> None:
    freeze = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    shown = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    pins = [match.group(0) for line in shown.splitlines() if (match := PIN.match(line))]
    kept = [pin for pin in pins if pin.partition("==")[0] not in INSTALLERS]
    LOCK.write_text(HEADER + "\n".join(kept) + "\n")
    print(f"{len(kept)} pins in {LOCK.name}")


if __name__ == "__main__":
    main()
