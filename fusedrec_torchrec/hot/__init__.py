"""Hot rows: replicated on every rank, looked up without a message, kept in sync.

================  =================================================================
``options``       what a user can choose
``cost``          when replication pays
``rule_checks``   whether rules can be followed
``choose``        which rows are hot: ids, the most used, a memory budget, the cost model
``index``         key of a hot row -> key of its replica
``home``          replicas -> the owner's table and back, for checkpoints
``share``         homes -> the replicas of all ranks
``adapt``         another hot set while training goes on
``rows``          all of it, for the fused tables of one module
================  =================================================================

After P2RES (PPoPP 2024), which replicates the rows that a performance model picks, and FAE (VLDB
2022), whose batches of nothing but hot rows need no exchange.  The owner's row of a hot row in its
table is its *home*.
"""
