"""``fusedrec train`` trains a DLRM as a configuration file says."""

import argparse
import sys
from typing import Any

from fusedrec_torchrec.cli.settings import settings_help
from fusedrec_torchrec.training.arguments import add_arguments, load_config
from fusedrec_torchrec.training.config import LaunchConfig, TrainConfig

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = commands.add_parser(
        "train",
        help="train a DLRM as a configuration file says",
        description="Trains a DLRM on the ranks that the configuration asks for.",
        **settings_help(TrainConfig),
    )
    add_arguments(parser)
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
    return _launch(config.launch, arguments)


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
