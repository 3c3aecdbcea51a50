"""``pdserve serve``: a cluster in the foreground, until a signal."""

import argparse
import math
import sys
from pathlib import Path

from pdserve.cluster.console import Console
from pdserve.core.config import ClusterConfig
from pdserve.core.config_file import load_config
from pdserve.core.environment import set_up_private_ray
from pdserve.core.plugin import load_plugin

DEFAULT_FILE = Path("cluster.yaml")
DEFAULT_GRACE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cluster_yaml",
        nargs="?",
        type=Path,
        help=f"the cluster file; default: ./{DEFAULT_FILE} where there is one, else all defaults",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the cluster file, e.g. --set decode.replicas=2; may be repeated",
    )
    parser.add_argument("--name", help="what `pdserve status` calls the cluster")
    parser.add_argument(
        "--grace-s",
        type=_grace,
        default=DEFAULT_GRACE_S,
        help="seconds that running requests get to finish after Ctrl-C (default %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Raises ConfigError, ModelFilesError, or what could not start."""
    config = load_config(cluster_file(arguments.cluster_yaml), arguments.set)
    prepare_environment(config)
    serve = load_plugin("pdserve.cluster.serving:serve")
    status = serve(config, arguments.name, arguments.grace_s, Console(sys.stdout))
    assert isinstance(status, int)
    return status


def cluster_file(given: Path | None) -> Path | None:
    """The file to read: the one that was named, else the default one if it is there."""
    if given is None and DEFAULT_FILE.exists():
        return DEFAULT_FILE
    return given


def prepare_environment(config: ClusterConfig) -> None:
    """To be called before anything imports Ray."""
    if config.ray.address == "local":
        set_up_private_ray()


def _grace(text: str) -> float:
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = math.nan
    if not 0 <= grace_s < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed are seconds, 0 and more")
    return grace_s
