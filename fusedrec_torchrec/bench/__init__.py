"""``fusedrec bench``: the fused sharding side by side with TorchRec's own.

Files, in reading order:

- ``suite``: what is measured;
- ``models``, ``workload``, ``multi_hot``, ``hot``: models and batches of a workload, its bags, its
  hot rows;
- ``systems``: the model sharded in different ways;
- ``rank``, ``ranks``, ``links``, ``allocators``, ``peak_memory``: one rank of a system, the
  processes of all its ranks, emulated hosts to run them on, how they keep memory, and how much they
  take at most;
- ``measure``, ``run``: all systems on one workload, and all workloads of a suite;
- ``requests``, ``bounds``, ``replay``, ``phases``, ``owners``: what a batch asks for, the least a
  step can cost, its messages alone, where its time goes, and how evenly owners are asked;
- ``statistics``, ``figures``, ``fusion``: medians of paired ratios, what the measurements say, and
  what fusing adds to dedup;
- ``results``: the file of the figures;
- ``report``, ``summary``, ``plots``, ``machine``: tables, the same for programs, plots, and what it
  was measured on;
- ``validate``: the planner's predictions against measurements.
"""
