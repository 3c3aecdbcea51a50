"""Generate pdserve/rpc/v1 from proto/pdserve/v1; with --check, only say whether it is fresh.

protoc writes `from pdserve.v1 import x_pb2`, after the proto package. Ours live in
`pdserve.rpc.v1`, so the import lines are rewritten; the names on the wire stay `pdserve.v1`.
"""

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = ROOT / "pdserve" / "rpc" / "v1"
IMPORT_LINE = re.compile(r"\bpdserve\.v1(?= import |\.\w+_pb2)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args().check
    fresh, present = generate(), committed()
    stale = sorted(n for n in fresh.keys() | present.keys() if fresh.get(n) != present.get(n))
    if check:
        for name in stale:
            print(f"stale: pdserve/rpc/v1/{name} (run `make proto`)")
        return 1 if stale else 0
    for name in stale:
        write(name, fresh.get(name))
    return 0


def generate() -> dict[str, str]:
    """File name -> text of everything that belongs into pdserve/rpc/v1."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("pdserve/v1/*.proto"))
    if not sources:
        sys.exit(f"no .proto file in {PROTO}/pdserve/v1")
    with tempfile.TemporaryDirectory() as out:
        arguments = [
            "protoc",
            f"-I{PROTO}",
            f"-I{resources.files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
        if protoc.main(arguments) != 0:
            sys.exit("protoc failed")
        made = Path(out, "pdserve", "v1").iterdir()
        texts = {path.name: IMPORT_LINE.sub("pdserve.rpc.v1", path.read_text()) for path in made}
    return {"__init__.py": "", **texts}


def committed() -> dict[str, str]:
    return {path.name: path.read_text() for path in TARGET.glob("*.py*")}


def write(name: str, text: str | None) -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    if text is None:
        (TARGET / name).unlink()
        print(f"removed pdserve/rpc/v1/{name}")
    else:
        (TARGET / name).write_text(text)
        print(f"wrote pdserve/rpc/v1/{name}")


if __name__ == "__main__":
    sys.exit(main())
