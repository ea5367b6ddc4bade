"""2D sparse parallelism: groups of model parallelism, replicated by data parallelism.

In the order of a step: ``groups`` the grid of ranks; ``tables`` rows that replicas have in common;
``touched`` which of them were used; ``average`` their sync; ``sync`` when; ``model_parallel``
all of it around a model.
"""
