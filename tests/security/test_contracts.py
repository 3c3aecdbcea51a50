"""What our own code must not do, read from its text: nothing of it unpickles or evaluates anything.

Ray pickles what it carries between its processes: docs/security.md.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "router", "prefill_node", "decode_node", "kv_transfer")
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    "eval",
    "exec",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "dist.all_gather_object",
    "dist.broadcast_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
    "dist.scatter_object_list",
    "dist.gather_object",
}
# Pipes of multiprocessing pickle: a benchmark's, between processes that it starts itself.
PIPES = {
    "pdserve/bench/engine_ranks.py",
    "pdserve/bench/router/processes.py",
    "pdserve/bench/router/fake_node.py",
    "pdserve/bench/transfer/pair.py",
}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_of_ours_unpickles(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not MODULES & {name.partition(".")[0] for name in imported(tree)}, path
        assert not CALLS & set(called(tree)), path


def test_pipes_that_pickle_are_a_benchmarks_alone() -> None:
    using = {
        str(path.relative_to(ROOT))
        for path in sources()
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0] == "multiprocessing"
        if name != "multiprocessing.shared_memory"
    }
    assert using <= PIPES


def test_the_one_yaml_loader_makes_plain_values() -> None:
    loaders = {
        (str(path.relative_to(ROOT)), ast.unparse(node))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.load"
    }
    assert {path for path, _ in loaders} <= {"pdserve/core/config_file.py"}
    assert all("_UniqueKeyLoader" in call for _, call in loaders)


def test_no_secret_is_an_option_of_a_command() -> None:
    """Command lines are seen by everybody on a host."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                names = " ".join(ast.unparse(argument) for argument in node.args)
                assert "secret" not in names, path
                assert "key" not in names.replace("KEY=VALUE", ""), path
