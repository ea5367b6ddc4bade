"""The fused data path: one batch, in the order the data flows.

======================  =========================================================
``options``             what a user can choose
``buckets``             tables -> buckets, and buckets -> physical FBGEMM tables
``layout``              buckets whose rows travel -> ranks and the fused key space
``bag_layout``          buckets whose owners pool bags -> ranks
``replication``         rows that live on several ranks, as the exchange sees them
``checks``              what names, shapes and types of a batch can tell
``features``            the batch in canonical form
``taken_slots``         the same on CUDA, where nobody counts ids
``id_counts``           how many there are, for who wants to know it later
``slot_features``       the part of it that belongs to some slots
``distinct_bags``       equal bags, once each
``hashing``             raw ids -> rows
``slot_ids``            the same for the slots of a batch, and ids out of range
``keys``                (table, id) -> key in the fused key space
``dedup``               unique keys + inverse
``row_numbers``         both, and which row is whose: on CPU one C++ operator
``routing``             unique keys -> owner rank, bucket and local row
``bag_routing``         distinct bags -> the owners of their tables
``device_bags``         distinct bags and their routes by kernels, all counts on the device
``bags``                which rows form which output row
``slot_bags``           the same for all slots at once, on CUDA
``slot_sequences``      the same for sequences
``requested_rows``      all of the above for tables whose rows travel
``requested_bags``      all of the above for tables whose owners pool
``variable_batch``      sequences of a variable batch per feature
``cargo``               what a batch sends: rows, and bags
``asked``               what an owner is asked for
``context``             what a rank remembers of a batch until backward
``capacity``            how much room a message has
``statuses``            what a rank says about its own batch, and who ran out of data
``outgoing_batch``      a batch on its way to the owners
``messages``            header + words; a second round if they do not fit
``all_replicated``      batches of nothing but replicated rows, which need no exchange
``input_dist``          ONE all-to-all: all of the above for one module
``large_lookups``       very long bags, table by table
``table_call``          one FBGEMM call for a physical table
``joint_call``          one FBGEMM call for several of them, on CUDA
``wire_order``          what calls give, as it travels
``row_changes``         what changes rows between their being sent and their being used
``lookup``              all of the calls
``late_gradients``      gradients that are waited for when the rest of backward is done
``output_dist``         ONE all-to-all of rows (and of their gradients, backward)
``bit_masks``           yes or no for each unit, as bits
``early_rows``          rows of a batch that travel before the others
``early_dist``          finds and sends rows of the next batch that are final already
``flat_rows``           where received rows lie
``pooling``             gather by inverse; sum, mean, weighted, or sequence
``gradients``           gradients of gradients are refused
======================  =========================================================

After FusedRec (AAAI 2026); equal bags after RecD (MLSys 2023).  The side that asks for rows is the
*requester*, the side that holds them the *owner*; every rank is both.  Of some tables distinct rows
travel, and the requester pools them; of others distinct bags do, pooled by the owner.  Both are in
the same three collectives.  Nothing here knows of hot rows or of 2D parallelism: they are
replications.
"""
