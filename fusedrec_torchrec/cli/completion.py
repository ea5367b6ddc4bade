"""``fusedrec completion`` prints a script that completes commands and options in a shell.

The script holds all there is to know, so completing starts no Python.
"""

import argparse
from typing import Any

from fusedrec_torchrec.cli.manual import add_parser

__all__ = ["SHELLS", "add_command", "script_for"]

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = {
    "fusedrec completion bash": "For ~/.local/share/bash-completion/completions/fusedrec.",
    "fusedrec completion zsh": "For a file _fusedrec in a folder of fpath.",
    "fusedrec completion fish": "For ~/.config/fish/completions/fusedrec.fish.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "completion",
        purpose="Prints a script for bash, zsh or fish, which then completes commands, options, "
        "what options take, configuration files, folders of runs, and the settings of --set.  "
        "Write it to where the shell looks for such scripts, again after an update: it starts no "
        "Python, and so is as fast as the shell.",
        examples=EXAMPLES,
        read_on="docs/commands.md",
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell it is for")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the script."""
    print(script_for(arguments.shell), end="")


def script_for(shell: str) -> str:
    """Returns the script for a shell, with all commands as they are."""
    from fusedrec_torchrec.bench.suite import SuiteConfig
    from fusedrec_torchrec.cli.bash_script import bash_script
    from fusedrec_torchrec.cli.command_tree import tree_of
    from fusedrec_torchrec.cli.fish_script import fish_script
    from fusedrec_torchrec.cli.main import parser_of
    from fusedrec_torchrec.cli.zsh_script import zsh_script
    from fusedrec_torchrec.core.config import options
    from fusedrec_torchrec.planner.config import PlannerConfig
    from fusedrec_torchrec.training.config import TrainConfig

    sections = {
        "train": TrainConfig,
        "plan": PlannerConfig,
        "simulate": PlannerConfig,
        "bench": SuiteConfig,
    }
    settings = {
        name: [option.path for option in options(section) if "*" not in option.path]
        for name, section in sections.items()
    }
    scripts = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    return scripts[shell](tree_of(parser_of(), settings))
