"""Trains DLRMs with TorchRec and the fused sharder, from one configuration file.

In the order of a run: ``config``, ``launch`` (starts the ranks), ``source`` (opens the data),
``model``, ``initialization``, ``optimizers``, ``metrics``, ``checkpoint``, ``logs``, ``loop`` (the
training itself), ``summary`` (table and curves at the end).
"""
