"""The ``pdserve`` command: says what there is, parses, and hands over to the command's own module.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``. It is loaded
only when it is asked for, so that `pdserve status` and `pdserve --help` answer at once.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pdserve.core.errors import ConfigError, ModelFilesError, PdserveError
from pdserve.core.plugin import load_plugin

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command is, and what it is for."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("pdserve.cluster.serve", "start a cluster and serve until Ctrl-C"),
    "demo": Command(
        "pdserve.cluster.demo.command", "serve a small model and ask it three questions"
    ),
    "status": Command("pdserve.cluster.status", "nodes, loads and routes of a running cluster"),
    "drain": Command("pdserve.cluster.drain", "send nothing new to a node of a running cluster"),
    "scale": Command("pdserve.cluster.scale", "change how many nodes of a role there are"),
    "role": Command("pdserve.cluster.role", "have a node of a running cluster change its role"),
    "models fetch": Command("pdserve.models.fetch_command", "download a model known by name"),
    "models list": Command("pdserve.models.list_command", "the models known by name"),
    "bench engine": Command("pdserve.bench.engine", "latency of prefill and decode steps"),
    "bench router": Command(
        "pdserve.bench.router.command", "what one router process adds, and how much it streams"
    ),
    "bench serve": Command("pdserve.bench.serve", "latency and goodput of a running server"),
    "bench overload": Command("pdserve.bench.overload", "capacity of a running server, and beyond"),
    "bench compare": Command("pdserve.bench.compare", "several settings of a cluster side by side"),
    "bench structured": Command(
        "pdserve.bench.structured.command", "answers by JSON schema, and what a grammar costs"
    ),
    "bench handoff": Command("pdserve.bench.handoff", "what a running server's hand-overs cost"),
    "bench transfer": Command("pdserve.bench.transfer.command", "KV from a node to another"),
    "bench soak": Command("pdserve.bench.soak.command", "mixed load while processes are killed"),
    "keys add": Command("pdserve.security.keys_command", "make an API key for a tenant"),
    "certs": Command("pdserve.security.certs_command", "make certificates for development"),
    "version": Command("pdserve.cluster.version", "print the version"),
}
GROUPS = {
    "models": "models that can be fetched by name",
    "bench": "measurements",
    "keys": "API keys",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Wrong usage leaves with argparse's SystemExit(2)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = _command_named(words)
    parsed = parser_for(words).parse_args(words)
    if name is None:
        raise AssertionError("argparse lets nothing through that is no command")
    try:
        status = load_plugin(f"{COMMANDS[name].module}:run")(parsed)
        sys.stdout.flush()
    except (ConfigError, ModelFilesError) as error:
        return _complain(error, EXIT_WRONG_INPUT)
    except PdserveError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `pdserve status | head`
        sys.stderr.close()
        return EXIT_FAILED
    assert isinstance(status, int)
    return status


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """What reads these words: all commands' names, and the arguments of the one that they name."""
    return _parser(_command_named(words))


def _command_named(words: Sequence[str]) -> str | None:
    """The command that the first words name, if any."""
    for num_words in (2, 1):
        if (name := " ".join(words[:num_words])) in COMMANDS:
            return name
    return None


def _parser(name: str | None) -> argparse.ArgumentParser:
    """All commands' names; the arguments of the one that was named."""
    top = argparse.ArgumentParser(
        prog="pdserve", description="LLM serving with prefill and decode on separate pools of GPUs."
    )
    top.add_argument("--version", action="version", version=f"pdserve {version('pdserve')}")
    places = {"": top.add_subparsers(title="commands", metavar="COMMAND", required=True)}
    for full_name, command in COMMANDS.items():
        group, _, word = full_name.rpartition(" ")
        if group not in places:
            parser = places[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            places[group] = parser.add_subparsers(metavar="COMMAND", required=True)
        parser = places[group].add_parser(
            word,
            help=command.summary,
            description=command.summary.capitalize() + ".",
            formatter_class=_WithDefaults,
        )
        if full_name == name:
            load_plugin(f"{command.module}:add_arguments")(parser)
    return top


class _WithDefaults(argparse.HelpFormatter):
    """Adds the defaults that say something, where the help does not speak of one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        is_shown = isinstance(default, (str, int, float, Path)) and not isinstance(default, bool)
        if not is_shown or default == argparse.SUPPRESS or "default" in text:
            return action.help
        return f"{action.help} (default: %(default)s)"


def _complain(error: Exception, status: int) -> int:
    print(f"pdserve: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
