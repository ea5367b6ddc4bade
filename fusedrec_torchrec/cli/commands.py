"""Which subcommands there are, and what each is for, in the order of ``--help``.

A command's file is imported only when its arguments are wanted: ``fusedrec --help`` needs none.
"""

from types import ModuleType

__all__ = ["COMMANDS", "module_of"]

COMMANDS = {
    "train": "train a DLRM as a configuration file says",
    "watch": "show runs live in the terminal or in a browser, and compare them",
    "checkpoint": "show, verify, convert or export a checkpoint",
    "prepare": "turn Criteo text files into parquet that trains at full speed",
    "profile": "show how the rows of the tables are accessed",
    "separate": "sort prepared data into hot samples and others, once, before training",
    "plan": "decide how tables are sharded, and say why",
    "simulate": "show how systems scale to thousands of ranks, by the cost model",
    "calibrate": "measure this cluster for the planner",
    "bench": "measure the fused sharding side by side with TorchRec's own",
    "inspect": "show what a plan, checkpoint, run or prepared data contains",
    "doctor": "examine this installation and machine, and write a report to send",
    "version": "show versions and capabilities",
    "completion": "print a script that completes commands and options in a shell",
}


def module_of(name: str) -> ModuleType:
    """Returns the file of a subcommand, which has ``add_command``."""
    if name in ("train", "watch", "checkpoint"):
        return _of_runs(name)
    if name in ("prepare", "profile", "separate"):
        return _of_data(name)
    if name in ("plan", "simulate", "calibrate"):
        return _of_planner(name)
    return _of_installation(name)


def _of_runs(name: str) -> ModuleType:
    if name == "train":
        from fusedrec_torchrec.cli import train

        return train
    if name == "watch":
        from fusedrec_torchrec.cli import watch

        return watch
    from fusedrec_torchrec.cli import checkpoint

    return checkpoint


def _of_data(name: str) -> ModuleType:
    if name == "prepare":
        from fusedrec_torchrec.cli import prepare

        return prepare
    if name == "profile":
        from fusedrec_torchrec.cli import profile

        return profile
    from fusedrec_torchrec.cli import separate

    return separate


def _of_planner(name: str) -> ModuleType:
    if name == "plan":
        from fusedrec_torchrec.cli import plan

        return plan
    if name == "simulate":
        from fusedrec_torchrec.cli import simulate

        return simulate
    from fusedrec_torchrec.cli import calibrate

    return calibrate


def _of_installation(name: str) -> ModuleType:
    if name == "bench":
        from fusedrec_torchrec.cli import bench

        return bench
    if name == "inspect":
        from fusedrec_torchrec.cli import inspect

        return inspect
    if name == "doctor":
        from fusedrec_torchrec.cli import doctor

        return doctor
    if name == "version":
        from fusedrec_torchrec.cli import version

        return version
    assert name == "completion", name
    from fusedrec_torchrec.cli import completion

    return completion
