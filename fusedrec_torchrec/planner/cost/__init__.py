"""The cost model: what a training step costs on a cluster.

===============  ================================================================================
``cluster``      links, memories and rates of a cluster
``table_load``   what a model asks of a table
``step``         a step as a list of stages, with the bytes or the work of every rank
``fusing``       whether fusing a table pays where no cluster is known
``memory``       bytes of a rank: tables, replicas of hot rows, buffers
``row_ranges``   which rows a rank owns, so that all are asked for as much
``straggle``     how much busier the busiest owner is, from sampled batches
===============  ================================================================================
"""
