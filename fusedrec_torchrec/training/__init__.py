"""Trains DLRMs with TorchRec and the fused sharder, from one configuration file.

In the order of a run: ``config``, ``arguments``, ``source`` (opens the data), ``checks``,
``device`` and ``check_sharding`` (what can be wrong, found before a rank starts), ``run_folder``
and ``run_state`` (where a run goes on), ``network`` (this machine as others see it), ``rendezvous``
(where machines meet), ``launch`` (starts the ranks), ``main`` (what a rank runs),
``process_group``, ``loaders``, ``model``, ``initialization``, ``optimizers``, ``metrics``,
``checkpoint``, ``logs``, ``loop`` (the training itself), ``summary`` (table and curves at the end).
``planner_files`` and ``planning`` make planning tasks of configuration files.
"""
