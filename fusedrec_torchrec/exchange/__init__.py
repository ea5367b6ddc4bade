"""The fused data path, in the order the data flows.

======================  =========================================================
``checks``              what names, shapes and types of a batch can tell
``features``            the batch in canonical form
``layout``              tables -> buckets, ranks and the fused key space
``hashing``, ``keys``   (table, id) -> key in the fused key space
``dedup``               unique keys + inverse
``routing``             unique keys -> owner rank, bucket and local row
``bags``                which rows form which output row
``input_dist``          ONE all-to-all: header + int32 local rows
``lookup``              one FBGEMM table per bucket
``output_dist``         ONE all-to-all of rows (and of their gradients, backward)
``pooling``             gather by inverse; sum, mean, weighted, or sequence
``native``              C++ operators for the hot loops, and where they come from
``buffers``, ``stages`` memory that is used again; names for what takes time
======================  =========================================================

After FusedRec (AAAI 2026).  The side that asks for rows is the *requester*, the side that
holds them the *owner*; every rank is both.
"""
