"""The sharded modules: TorchRec's own, which also know the fused sharding types.

=====================  ==========================================================
``checks``             plans that TorchRec would accept and train wrongly
``agreement``          ranks that were given different things
``module_set``         modules that share their batches
``stock_ids``          range checks for stock tables beside fused ones
``length_limits``      bags that are too long for their feature processor
``fused_tables``       the fused tables of a module, before and after the input dist
``batches_ahead``      ranks of a pipeline that have different numbers of batches
``end_of_data``        what a rank sends in place of a batch that it does not have
``embedding_bag``      EmbeddingBagCollection
``dense_sequences``    data-parallel tables of an EmbeddingCollection on CPU
``embedding``          EmbeddingCollection
``position_weights``   learned weights of positions, for all features at once
``feature_processed``  FeatureProcessedEmbeddingBagCollection
=====================  ==========================================================

Fused and stock tables live side by side in one module; everything but the fused tables' stages
is inherited: state dicts, optimizers, pipelines, stock shardings.
"""
