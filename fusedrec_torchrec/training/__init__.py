"""Trains DLRMs with TorchRec and the fused sharder, from one configuration file.

In the order of a run: ``config``, ``network`` (this machine as others see it), ``rendezvous``
(where machines meet), ``launch`` (starts the ranks), ``source`` (opens the data),
``process_group``, ``model``, ``initialization``, ``optimizers``, ``metrics``, ``checkpoint``,
``logs``, ``loop`` (the training itself), ``summary`` (table and curves at the end).
"""
