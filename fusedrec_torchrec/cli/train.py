"""``fusedrec train`` trains a DLRM as a configuration file says."""

import argparse
import sys
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.core.json_file import read_json
from fusedrec_torchrec.training.arguments import add_arguments, load_config
from fusedrec_torchrec.training.config import LaunchConfig, TrainConfig
from fusedrec_torchrec.training.summary import SUMMARY

__all__ = ["add_command"]

EXAMPLES = {
    "fusedrec train --config configs/tiny.yaml --overwrite": "Trains a small model in seconds.",
    "fusedrec train --config configs/tiny.yaml --resume --set steps=420": "Goes on with that run.",
    "fusedrec train --config configs/tiny.yaml --set sharding.type=table_wise --set steps=40 "
    "--set logging.directory=runs/table_wise": "Trains with another sharding, elsewhere.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "train",
        purpose="Trains a DLRM on the ranks that a configuration file asks for, of this machine or "
        "of several, and leaves configuration, plan, records, curves and checkpoints in "
        "logging.directory.  Mistakes in settings, paths and data are told before any rank starts.",
        examples=EXAMPLES,
        read_on="docs/training.md, docs/configuration.md",
        settings=TrainConfig,
    )
    add_arguments(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Checks the run, starts its ranks and waits for them."""
    config = load_config(arguments.config, arguments.set)
    one_machine = config.launch.nodes == 1
    if arguments.overwrite and not one_machine:
        raise ValueError(
            "--overwrite is for one machine, where it is clear when a run begins; choose another "
            f"logging.directory than {config.logging.directory}, or remove it"
        )

    from fusedrec_torchrec.training.checks import open_data
    from fusedrec_torchrec.training.run_folder import check_run, locked

    source = open_data(config, config.launch.ranks if one_machine else 1, not arguments.quiet)

    def check_folder() -> None:
        with locked(config.logging.directory):
            check_run(config, source, arguments.resume, arguments.overwrite)

    # A folder that is there already can be checked at once; a new one is not made in vain.
    folder_exists = config.logging.directory.is_dir()
    if one_machine and folder_exists:
        check_folder()

    from fusedrec_torchrec.training.device import check_device, device_type

    check_device(config.launch)

    from fusedrec_torchrec.training.check_plan import check_plan

    check_plan(config, source, device_type(config.launch))
    if one_machine and not folder_exists:
        check_folder()
    code = _launch(config.launch, arguments)
    folder = config.logging.directory
    if arguments.json and code == 0 and (folder / SUMMARY).is_file():  # on the first machine
        print_json({"directory": folder, **read_json(folder, SUMMARY)})
    return code


def _launch(config: LaunchConfig, arguments: argparse.Namespace) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from fusedrec_torchrec.training.launch import launch
    from fusedrec_torchrec.training.rendezvous import LostMachineError

    try:
        launch(config, _again(arguments))
    except SignalException as error:
        print(f"fusedrec train: stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        text = failure.message if isinstance(failure.message, str) else failure.message["message"]
        print(f"fusedrec train: rank {rank} failed: {text}", file=sys.stderr)
        return 1
    except LostMachineError as error:
        print(f"fusedrec train: {error}", file=sys.stderr)
        return 1
    return 0


def _again(arguments: argparse.Namespace) -> list[str]:
    """Returns the command line for the ranks."""
    command = ["--config", arguments.config]
    for override in arguments.set:
        command += ["--set", override]
    if arguments.resume:
        command += ["--resume", arguments.resume]
    if arguments.overwrite:
        command.append("--overwrite")
    if arguments.quiet:
        command.append("--quiet")
    return command
