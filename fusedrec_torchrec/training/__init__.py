"""Trains DLRMs with TorchRec and the fused sharder, from one configuration file.

Files, in the order of a run:

- ``config``: what a user can set;
- ``main``: what a rank runs, from the arguments to the summary (``__main__`` calls it);
- ``network``, ``rendezvous``, ``launch``: this machine as others see it, where machines meet, and
  how the ranks are started;
- ``source``: opens the data, with ``data`` below it;
- ``check_sharding``: finds what is wrong with the sharding before any rank starts;
- ``process_group``: the process group, whose ranks may be on several machines;
- ``run_folder``: who may write into the folder of a run, and where the run goes on;
- ``loop``: the training itself, which uses the files below;
- ``agreement``: compares what the ranks of a training must have in common;
- ``model``, ``initialization``, ``optimizers``: the model, its first weights, its optimizers;
- ``batch_reader``, ``bad_batches``: batches that cannot be read or must not be trained on;
- ``metrics``, ``logs``: quality of predictions, and records of a run;
- ``checkpoint``: checkpoints of a run, whole or not there at all;
- ``summary``: table and curves at the end;
- ``planning``: planning tasks from files, for ``fusedrec plan``.
"""
