"""The cost model: what a training step costs on a cluster.

===============  ================================================================================
``cluster``      links, memories and rates of a cluster
``table_load``   what a model asks of a table
``stages``       a step as a list of stages, with the bytes or the work of every rank
``stock``        the stages of a step of TorchRec's shardings
``step``         the stages of a step of fused tables, and the formulas of all
``fusing``       who pools a fused table where no cluster is known
``memory``       bytes of a rank: tables, replicas of hot rows, buffers
``row_ranges``   which rows a rank owns, so that all are asked for as much
``straggle``     how much busier the busiest owner is, from sampled batches
``roofline``     the least time of a step on GPUs, which nobody has measured
===============  ================================================================================
"""
