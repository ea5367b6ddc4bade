"""``fusedrec bench``: the fused sharding side by side with TorchRec's own.

Files, in reading order:

- ``suite``: what is measured;
- ``workload``, ``hot``: models and batches of a workload, and its hot rows;
- ``systems``: the model sharded in different ways;
- ``rank``, ``ranks``, ``links``: one rank of a system, the processes of all its ranks, and
  emulated hosts to run them on;
- ``measure``, ``run``: all systems on one workload, and all workloads of a suite;
- ``bounds``, ``phases``, ``owners``: the least a step can cost, where its time goes, and how
  evenly owners are asked;
- ``statistics``, ``figures``: medians of paired ratios, and what the measurements say;
- ``results``: the file of the figures;
- ``report``, ``plots``, ``machine``: tables, plots, and what it was measured on;
- ``validate``: the planner's predictions against measurements.
"""
