"""2D sparse parallelism: groups of model parallelism, replicated by data parallelism.

==================  ============================================================
``groups``          the grid of ranks, and a plan on the ranks of a group
``tables``          rows that replicas have in common
``touched``         which of them were used since the last sync
``average``         the sync of weights: touched rows become their average
``gradients``       or one update with the gradients of all groups
``env``             TorchRec's sharding environment, which knows about the latter
``sync``            when replicas are brought together
``model_parallel``  all of it around a model
==================  ============================================================

After "Two-dimensional sparse parallelism" (Meta, 2025).
"""
