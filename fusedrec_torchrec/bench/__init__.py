"""``fusedrec bench``: the fused sharding side by side with TorchRec's own.

``suite`` says what is measured, ``workload`` makes models and batches, ``systems`` shards them,
``measure`` runs on every rank, ``ranks`` and ``links`` start the ranks on real or emulated hosts,
``bounds`` and ``statistics`` say how good a step is, ``results`` is the file of the figures,
``report`` and ``plots`` show it.
"""
