"""Trains DLRMs with TorchRec and the fused sharder, from one configuration file.

Files, in the order of a run:

- ``config``, ``arguments``: what a user can set, and the command's arguments;
- ``source``: opens the data, with ``data`` below it;
- ``checks``, ``check_sharding``, ``device``, ``check_plan``: find what is wrong with a run before
  any rank starts;
- ``run_folder``, ``run_state``: who may write into the folder of a run, and where the run goes on;
- ``network``, ``rendezvous``, ``launch``: this machine as others see it, where machines meet, and
  how the ranks are started;
- ``main``: what a rank runs, from the arguments to the summary (``__main__`` calls it);
- ``process_group``: the process group, whose ranks may be on several machines;
- ``loop``: the training itself, which uses the files below;
- ``agreement``: compares what the ranks of a training must have in common;
- ``loaders``: batches of the data for one rank;
- ``model``, ``initialization``, ``optimizers``: the model, its first weights, its optimizers;
- ``batch_reader``, ``bad_batches``: batches that cannot be read or must not be trained on;
- ``metrics``, ``logs``, ``observed_step``: quality of predictions, records of a run, and what one
  step of each record was like;
- ``checkpoint``: checkpoints of a run, whole or not there at all;
- ``summary``: table and curves at the end;
- ``from_python``: trains on batches or tables of a Python program;
- ``planner_files``, ``planning``: planning tasks from files, for ``fusedrec plan``.
"""

from typing import TYPE_CHECKING

__all__ = ["train"]

if TYPE_CHECKING:
    from fusedrec_torchrec.training.from_python import train
else:  # so that the check of a configuration need not wait for torch

    def __getattr__(name: str) -> object:
        """Imports the function when it is used for the first time."""
        if name != "train":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fusedrec_torchrec.training.from_python import train

        return train
