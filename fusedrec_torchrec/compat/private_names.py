"""Every private name of TorchRec, FBGEMM and torch that the package uses.

Private names may change with any release.  ``tests/compat/test_private_names.py`` checks that each
of them is there, with the parameters that we pass or override, and that the package uses no others.
So when a new version of a library comes out, run that test first: it says what has gone, and the
docstring of the file that uses it says what for.

FBGEMM's tables also have attributes without an underscore that nobody documents.  They change as
easily, so they are ``UNDOCUMENTED_NAMES``, and only ``compat`` uses them.
"""

from dataclasses import dataclass

__all__ = ["PRIVATE_NAMES", "UNDOCUMENTED_NAMES", "PrivateName"]


@dataclass(frozen=True)
class PrivateName:
    """A private or undocumented name of another library.

    Attributes:
        owner: the module or class that has it.
        name: what it is called.
        parameters: of a function or method, those that we rely on; None if it is neither.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None = None


def _of(owner: str, *names: str, **functions: tuple[str, ...]) -> list[PrivateName]:
    """Returns names of one owner: attributes, and functions with their parameters."""
    attributes = [PrivateName(owner, name) for name in names]
    return attributes + [PrivateName(owner, name, given) for name, given in functions.items()]


PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_of(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training.SplitTableBatchedEmbeddingBagsCodegen",
        _apply_split=("self", "split", "prefix"),
        _generate_vbe_metadata=("self", "offsets", "batch_size_per_feature_per_rank"),
        _set_learning_rate=("self", "lr"),
    ),
    *_of(
        "torch",
        "_C",
    ),
    *_of(
        "torch.Tensor",
        "_version",
    ),
    *_of(
        "torch._C",
        "_autograd",
        "_distributed_c10d",
    ),
    *_of(
        "torch._C._autograd",
        "_profiler_enabled",
    ),
    *_of(
        "torch._ops.OpOverload",
        "_schema",
    ),
    *_of(
        "torch.distributed.ProcessGroup",
        "_get_backend",
    ),
    *_of(
        "torch.distributed.ProcessGroupGloo._Options",
        "_timeout",
    ),
    *_of(
        "torch.distributed.checkpoint",
        "_nested_dict",
        "_traverse",
    ),
    *_of(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        "_StoragePrefix",
    ),
    *_of(
        "torch.distributed.checkpoint.metadata",
        "_MEM_FORMAT_ENCODING",
    ),
    *_of(
        "torch.distributed.distributed_c10d",
        "_world",
        _get_default_group=(),
        _get_default_store=(),
        _new_process_group_helper=(
            "group_size",
            "group_rank",
            "global_ranks_in_group",
            "backend",
            "store",
            "group_name",
            "timeout",
            "group_desc",
        ),
    ),
    *_of(
        "torch.distributed.optim.apply_optimizer_in_backward",
        "_optimizer_classes",
        "_optimizer_kwargs",
    ),
    *_of(
        "torch.distributed.remote_device",
        "_remote_device",
    ),
    *_of(
        "torch.nn.parallel.DistributedDataParallel",
        "_comm_hooks",
    ),
    *_of(
        "torch.utils",
        "_python_dispatch",
    ),
    *_of(
        "torchrec.distributed.batched_embedding_kernel.BaseBatchedEmbedding",
        "_feature_table_map",
        "_local_cols",
        "_local_rows",
    ),
    *_of(
        "torchrec.distributed.batched_embedding_kernel.BaseBatchedEmbeddingBag",
        "_local_cols",
        "_local_rows",
    ),
    *_of(
        "torchrec.distributed.batched_embedding_kernel.BatchedFusedEmbeddingBag",
        "_optim",
    ),
    *_of(
        "torchrec.distributed.embedding.EmbeddingCollectionAwaitable",
        "_awaitables_per_sharding",
    ),
    *_of(
        "torchrec.distributed.embedding.EmbeddingCollectionSharder",
        "_use_index_dedup",
    ),
    *_of(
        "torchrec.distributed.embedding.ShardedEmbeddingCollection",
        "_device",
        "_embedding_configs",
        "_embedding_dim",
        "_embedding_names_per_sharding",
        "_env",
        "_has_uninitialized_input_dist",
        "_need_indices",
        "_module_fqn",
        "_sharding_type_to_sharding",
        "_sharding_types",
        _create_input_dist=("self", "input_feature_names", "ctx"),
    ),
    *_of(
        "torchrec.distributed.embedding_kernel.BaseEmbedding",
        "_emb_module",
    ),
    *_of(
        "torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup",
        _create_embedding_kernel=("self", "config", "pg", "device", "env"),
    ),
    *_of(
        "torchrec.distributed.embedding_lookup.GroupedPooledEmbeddingsLookup",
        "_emb_modules",
        _create_embedding_kernel=("self", "config", "device", "pg", "sharding_type", "env"),
    ),
    *_of(
        "torchrec.distributed.embedding_types.BaseEmbeddingSharder",
        "_fused_params",
        "_sharded_module_order_overwrite",
    ),
    *_of(
        "torchrec.distributed.embedding_types.ShardedEmbeddingModule",
        "_input_dists",
        "_lookups",
    ),
    *_of(
        "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection",
        "_device",
        "_embedding_bag_configs",
        "_embedding_dims",
        "_embedding_names",
        "_embedding_shardings",
        "_env",
        "_has_mean_pooling_callback",
        "_has_uninitialized_input_dist",
        "_inverse_indices_permute_indices",
        "_is_weighted",
        "_module_fqn",
        "_sharding_types",
        _create_input_dist=("self", "input_feature_names"),
        _create_inverse_indices_permute_indices=("self", "inverse_indices"),
        _init_mean_pooling_callback=("self", "input_feature_names", "inverse_indices"),
        _initialize_torch_state=("self", "skip_registering"),
    ),
    *_of(
        "torchrec.distributed.embeddingbag.VariableBatchEmbeddingBagCollectionAwaitable",
        "_awaitables",
    ),
    *_of(
        "fbgemm_gpu.quantize_comm.QuantizedCommCodec",
        "_comm_precision",
        "_loss_scale",
    ),
    *_of(
        "torchrec.distributed.fp_embeddingbag.FeatureProcessedEmbeddingBagCollectionSharder",
        "_ebc_sharder",
    ),
    *_of(
        "torchrec.distributed.fp_embeddingbag.ShardedFeatureProcessedEmbeddingBagCollection",
        "_embedding_bag_collection",
        "_feature_processors",
        "_is_collection",
    ),
    *_of(
        "torchrec.distributed.model_parallel.DMPCollection",
        "_ctxs",
        "_default_ctx",
        "_device",
        "_submodule_ctxs",
    ),
    *_of(
        "torchrec.distributed.model_parallel.DistributedModelParallel",
        "_dmp_wrapped_module",
        _fused_optim_impl=("self", "module", "fused_optims", "path", "module_id_cache"),
        _init_optim=("self", "module"),
    ),
    *_of(
        "torchrec.distributed.planner.enumerators.EmbeddingEnumerator",
        "_batch_size",
        "_compute_device",
        "_constraints",
        "_world_size",
        _filter_compute_kernels=("self", "name", "allowed_compute_kernels", "sharding_type"),
        _filter_sharding_types=("self", "name", "allowed_sharding_types", "sharder_key"),
    ),
    *_of(
        "torchrec.distributed.planner.planners.EmbeddingPlannerBase",
        "_batch_size",
        "_constraints",
        "_storage_reservation",
        "_topology",
    ),
    *_of(
        "torchrec.distributed.planner.stats",
        _get_sharding_type_abbr=("sharding_type",),
    ),
    *_of(
        "torchrec.distributed.planner.stats.EmbeddingStats",
        _get_shard_stats=(
            "self",
            "shard",
            "sharding_option",
            "world_size",
            "local_world_size",
            "constraints",
        ),
    ),
    *_of(
        "torchrec.distributed.sharding.dp_sharding.BaseDpEmbeddingSharding",
        "_device",
        "_env",
        "_grouped_embedding_configs",
    ),
    *_of(
        "torchrec.distributed.sharding.cw_sharding.BaseCwEmbeddingSharding",
        "_pg",
    ),
    *_of(
        "torchrec.distributed.sharding.grid_sharding.BaseGridEmbeddingSharding",
        "_pg",
    ),
    *_of(
        "torchrec.distributed.sharding.cw_sharding.BaseCwEmbeddingSharding",
        _shard=("self", "sharding_infos"),
    ),
    *_of(
        "torchrec.distributed.sharding.rw_sharding.BaseRwEmbeddingSharding",
        "_device",
        "_env",
        "_grouped_embedding_configs",
        "_grouped_embedding_configs_per_rank",
        "_pg",
        "_rank",
        "_world_size",
        _shard=("self", "sharding_infos"),
    ),
    *_of(
        "torchrec.distributed.sharding.tw_sharding.BaseTwEmbeddingSharding",
        "_pg",
    ),
    *_of(
        "torchrec.distributed.sharding.tw_sharding.BaseTwEmbeddingSharding",
        _shard=("self", "sharding_infos"),
    ),
    *_of(
        "torchrec.distributed.sharding.twrw_sharding.BaseTwRwEmbeddingSharding",
        "_pg",
    ),
    *_of(
        "torchrec.distributed.train_pipeline.train_pipelines.TrainPipelineSparseDist",
        "_pipelined_modules",
        _backward=("self", "losses"),
        _pipeline_model=("self", "batch", "context", "pipelined_forward"),
    ),
    *_of(
        "torchrec.distributed.train_pipeline.utils",
        _fuse_input_dist_splits=("context",),
    ),
    *_of(
        "torchrec.distributed.types.Awaitable",
        _wait_impl=("self",),
    ),
    *_of(
        "torchrec.modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection",
        "_embedding_bag_collection",
        "_feature_processors",
    ),
    *_of(
        "torchrec.sparse.jagged_tensor.KeyedJaggedTensor",
        "_inverse_indices",
    ),
)

UNDOCUMENTED_NAMES: tuple[PrivateName, ...] = (
    *_of(
        "fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args.OptimizerArgs",
        "eps",
        "gradient_clipping",
        "max_norm",
        "stochastic_rounding",
        "weight_decay",
        "weight_decay_mode",
    ),
    *_of(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training.SplitTableBatchedEmbeddingBagsCodegen",
        "D_offsets",
        "current_device",
        "embedding_specs",
        "feature_table_map",
        "hash_size_cumsum",
        "iter",
        "iter_cpu",
        "learning_rate_tensor",
        "lxu_cache_weights",
        "max_D",
        "momentum1_dev",
        "momentum1_host",
        "momentum1_offsets",
        "momentum1_physical_offsets",
        "momentum1_physical_placements",
        "momentum1_placements",
        "momentum1_uvm",
        "optimizer",
        "optimizer_args",
        "output_dtype",
        "pooling_mode",
        "prefetch_pipeline",
        "prev_iter_physical_offsets",
        "total_hash_size_bits",
        "weights_dev",
        "weights_host",
        "weights_offsets",
        "weights_physical_offsets",
        "weights_physical_placements",
        "weights_placements",
        "weights_precision",
        "weights_uvm",
    ),
)
"""Attributes without an underscore, set on objects, that FBGEMM does not document."""
