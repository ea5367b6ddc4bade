"""The fused data path: one batch, in the order the data flows.

======================  =========================================================
``options``             what a user can choose
``buckets``             tables -> buckets, one FBGEMM table each
``layout``              buckets -> ranks and the fused key space
``bag_layout``          where tables live whose owners pool bags
``asked``               what an owner is asked for
``replication``         rows that live on several ranks, as the exchange sees them
``checks``              what names, shapes and types of a batch can tell
``features``            the batch in canonical form
``slot_features``       the part of a batch that belongs to some slots
``hashing``             raw ids -> rows
``slot_ids``            ids -> rows of their tables, and what is said of bad ones
``distinct_bags``       bags that hold the same ids, found once
``keys``                (table, id) -> key in the fused key space
``dedup``               unique keys + inverse
``routing``             unique keys -> owner rank, bucket and local row
``bag_routing``         distinct bags -> owners, and what is written for them
``cargo``               all that a batch sends: rows of some tables, bags of others
``bags``                which rows form which output row
``variable_batch``      the same for sequences of a variable batch per feature
``context``             what a rank remembers of a batch until backward
``capacity``            how much room a message has
``statuses``            what a rank says about its own batch, and who ran out of data
``outgoing_batch``      a batch on its way to the owners
``messages``            header + words; a second round if they do not fit
``all_replicated``      batches of nothing but replicated rows, which need no exchange
``requested_rows``      rows that are asked of their owners, from batch to output
``requested_bags``      bags that owners are asked to pool, from batch to output
``input_dist``          ONE all-to-all: all of the above for one module
``lookup``              one FBGEMM call per bucket
``output_dist``         ONE all-to-all of rows (and of their gradients, backward)
``pooling``             gather by inverse; sum, mean, weighted, or sequence
``gradients``           gradients of gradients are refused
======================  =========================================================

After FusedRec (AAAI 2026).  The side that asks for rows is the *requester*, the side that
holds them the *owner*; every rank is both.  Nothing here knows of hot rows or of 2D parallelism:
they are replications.
"""
