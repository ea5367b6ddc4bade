"""The ``fusedrec`` command, of which every subcommand has a file of its own.

Exit codes: 0 done; 1 a run failed; 2 wrong usage, configuration, paths or data; 130 interrupted.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence

from fusedrec_torchrec.core.files import described

__all__ = ["main"]

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    for name in ("torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        sys.exit(
            f"fusedrec needs {error.name}, which is not installed: "
            "pip install 'fusedrec-torchrec[train]'"
        )


def _run(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
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


def _parser() -> argparse.ArgumentParser:
    from fusedrec_torchrec.cli import (
        bench,
        calibrate,
        checkpoint,
        doctor,
        inspect,
        plan,
        prepare,
        profile,
        separate,
        simulate,
        train,
        version,
    )

    parser = argparse.ArgumentParser(
        prog="fusedrec",
        description="Fused, deduplicated embedding sharding for TorchRec.",
        epilog="Exit codes: 0 done, 1 a run failed, 2 wrong usage, configuration, paths or data, "
        "130 interrupted.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    data, planning = (prepare, profile, separate), (plan, simulate, calibrate)
    for module in (train, checkpoint, *data, *planning, bench, inspect, doctor, version):
        module.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
