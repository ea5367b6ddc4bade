"""Rows that live on several ranks and get the same update on all of them.

===========  ==================================================================
``replica``  a bucket's rows on one rank: weights, optimizer state, the update
``coded``    gradients that travel by a codec; what it takes from them is kept
``alone``    a replica that goes on alone for some steps
``sync``     gradients of all ranks -> the same update of every replica
===========  ==================================================================

Hot rows are replicas on the ranks of a process group, the shards of 2D parallelism on the ranks of
several groups.  A row of a replica has a *place* in it.
"""
