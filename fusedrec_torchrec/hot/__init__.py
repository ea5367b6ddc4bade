"""Hot rows: replicated on every rank, looked up without a message, kept in sync.

================  =================================================================
``options``       what a user can choose
``choose``        which rows are hot: ids, the most used, a memory budget, the cost model
``cost``          when replication pays
``index``         key of a hot row -> key of its replica
``replica``       a bucket's hot rows on one rank: weights and optimizer state
``sync``          gradients of all ranks -> the same update of every replica
``home``          replicas -> the owner's table and back, for checkpoints
``counter``       which rows are used most, in bounded memory
``adapt``         another hot set while training goes on
``rows``          all of it, for the fused tables of one module
================  =================================================================

After P2RES (PPoPP 2024), which replicates the rows that a performance model picks, and FAE (VLDB
2022), whose batches of nothing but hot rows need no exchange.  The owner's slot of a hot row in its
table is its *home*.
"""
