"""The ``fusedrec`` command, of which every subcommand has a file of its own.

Exit codes: 0 done; 1 a run failed; 2 wrong usage, configuration, paths or data; 130 interrupted.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence

from fusedrec_torchrec.cli.commands import COMMANDS, module_of
from fusedrec_torchrec.cli.json_output import only_json
from fusedrec_torchrec.cli.manual import ManualFormatter, epilog_of
from fusedrec_torchrec.core.files import described

__all__ = ["main", "parser_of"]

FAILED, USAGE, INTERRUPTED = 1, 2, 130
EXAMPLES = {
    "fusedrec train --config configs/tiny.yaml --overwrite": "Train a small model in seconds.",
    "fusedrec watch runs/tiny": "Look at its curves.",
    "fusedrec doctor": "Examine this installation.",
    "fusedrec train --help": "Read about one command and all of its settings.",
}
EXIT_CODES = (
    "exit codes: 0 done; 1 a run failed, a comparison found a difference, or something examined\n"
    "is not as it should be; 2 wrong usage, configuration, paths or data; 130 interrupted;\n"
    "143 stopped by SIGTERM"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    for name in ("torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        sys.exit(
            f"fusedrec needs {error.name}, which is not installed: docs/install.md says how "
            "(pip install '.[train]' in a checkout, or requirements-cpu.txt on CPU)"
        )


def _run(arguments: Sequence[str]) -> int:
    # The arguments of other commands need not be known, which takes time.
    named = next((word for word in arguments if not word.startswith("-")), "")
    parsed = parser_of([named]).parse_args(arguments)
    try:
        with only_json(getattr(parsed, "json", False)):
            return int(parsed.run(parsed) or 0)
    except ValueError as error:
        print(f"fusedrec {parsed.command}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"fusedrec {parsed.command}: {described(error)}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"fusedrec {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def parser_of(names: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Returns the parser of the command line, with the arguments of these subcommands."""
    parser = argparse.ArgumentParser(
        prog="fusedrec",
        description="Fused, deduplicated embedding sharding for TorchRec: trains, watches, plans, "
        "measures and examines.",
        epilog=f"{epilog_of(EXAMPLES, 'docs/first_run.md, docs/commands.md')}\n\n{EXIT_CODES}",
        formatter_class=ManualFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name in names:
            module_of(name).add_command(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
