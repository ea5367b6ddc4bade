"""The only place that reaches into the insides of TorchRec, FBGEMM and torch.

======================  =========================================================
``private_names``       every private name of theirs that the package uses
``optimizers``          FBGEMM's fused optimizers: where they run, their state
``momentum_scale``      momentum-scaled row-wise AdaGrad by FBGEMM's row-wise AdaGrad
``fbgemm_table``        what FBGEMM's tables know and have no methods to ask for
``table_layout``        some tables of a bucket, as FBGEMM lays them out
``joint_table``         one FBGEMM table that has the memory of several
``bucket_table``        one FBGEMM table that looks like several to TorchRec
``joint_kernel``        several of them, looked up in one call
``table_shards``        tables that lie whole on a rank, or by columns on several
``row_update``          FBGEMM's update of rows whose gradients are at hand
``lookups``             the lookups of sharded modules
``stores``              where ranks meet
``process_groups``      timeout and store of a process group; another one of the same ranks
``id_group``            the process group in which ids travel on CPU
``empty_batches``       batches of no samples beside stock row-wise tables
``awaitables``          parts of TorchRec's awaitables; splits of a pipeline
``jagged_tensor``       what KeyedJaggedTensor does not let others set
``feature_processors``  the processors of a feature-processed module
``dmp_collection``      TorchRec's DMPCollection on any device
``communication_hooks``  the hooks of DistributedDataParallel
``model_parallel``      the model inside of DistributedModelParallel
``placement``           where a shard is, in plans
``planner_stats``       abbreviations in TorchRec's planner statistics
``model_trackers``      TorchRec's model trackers, which are refused
``stock_planner``       whether TorchRec's own planner asks
``inference_mode``      leaves it where FBGEMM has no kernels for it
``tensor_version``      how often a tensor was written to
``dispatch``            torch's dispatcher and the names of its operators
``profiler``            whether torch's profiler is on
``quantized_communication``  what FBGEMM's codecs of qcomm registries are set to
``distributed_checkpoint``   torch's checkpoint files and how it flattens state dicts
======================  =========================================================

A new version of TorchRec fails first in the test of ``private_names``, which says what to look at.
It comes before all other parts and imports none of them.
"""
