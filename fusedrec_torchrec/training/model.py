"""Builds TorchRec's DLRM, and shards it, as configured."""

import warnings
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.codecs.dense_gradients import ThresholdedDataParallel
from fusedrec_torchrec.grid.model_parallel import GridModelParallel
from fusedrec_torchrec.planner.planner import FusedShardingPlanner
from fusedrec_torchrec.sharding.fused_params import fused_params
from fusedrec_torchrec.sharding.grid_options import GridOptions
from fusedrec_torchrec.sharding.plan_conversion import plan_file_of, sharding_plan_of
from fusedrec_torchrec.sharding.plan_file import PlanFile, read_plan
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES
from fusedrec_torchrec.training.config import ModelConfig, TrainConfig
from fusedrec_torchrec.training.data.data_config import copies_of
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.initialization import initialize_tables

__all__ = ["build_model", "shard_model"]

MODEL_PARALLEL = [*FUSED_TYPES, "table_wise", "row_wise", "column_wise"]


def build_model(config: ModelConfig, source: Source, device: torch.device) -> DLRMTrain:
    """Builds the model with its loss; embedding tables are on the meta device."""
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=config.embedding_dim,
                feature_names=[f for f, table in source.features.items() if table == name],
            )
            for name, rows in source.table_rows.items()
        ],
        is_weighted=source.weighted,
        device=torch.device("meta"),
    )
    common = (tables, source.dense_features, config.dense_arch, config.over_arch)
    with warnings.catch_warnings():
        if not source.dense_features:  # the first layer is its bias then
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return DLRMTrain(_dlrm(config, common, device))


def _dlrm(config: ModelConfig, common: tuple[Any, ...], device: torch.device) -> nn.Module:
    """Builds the model of a configuration."""
    if config.architecture == "dlrm_dcn":
        return DLRM_DCN(
            *common,
            dcn_num_layers=config.dcn_layers,
            dcn_low_rank_dim=config.dcn_low_rank,
            dense_device=device,
        )
    if config.architecture == "dlrm_projection":
        first, second = config.projection_branches
        return DLRM_Projection(
            *common,
            interaction_branch1_layer_sizes=first,
            interaction_branch2_layer_sizes=second,
            dense_device=device,
        )
    return DLRM(*common, dense_device=device)


def shard_model(
    model: DLRMTrain, config: TrainConfig, source: Source, device: torch.device
) -> tuple[DistributedModelParallel, tuple[PlanFile, HotSet | None]]:
    """Plans, shards and initializes the model; must be called on all ranks.

    Returns:
        The model, and its plan as a file with the hot rows that it has.
    """
    group = dist.group.WORLD
    assert group is not None
    exchange, hot, grid = config.sharding.exchange, config.sharding.hot, config.sharding.grid
    file = hot_set = None
    if config.plan is not None:
        file, hot_set = read_plan(config.plan)
        exchange, hot, grid = file.exchange_options(exchange), file.hot_options(hot), file.grid
    sharders = fused_sharders(
        fused_params=fused_params(config.optimizer.embedding), options=exchange, hot=hot
    )
    if grid is not None:
        grid.groups(dist.get_world_size())
    if file is not None:
        file.check_device(device.type, str(config.plan))
        file.check_ranks(dist.get_world_size(), str(config.plan))
        plan = sharding_plan_of(file, hot_set, model, sharders, str(config.plan))
    else:
        plan = _planned(model, config, source, device, sharders, grid)
        settings = {
            "input_dist": exchange.input_dist,
            "grid": grid and asdict(grid),
            "codecs": exchange.codecs and asdict(exchange.codecs),
        }
        local = min(get_local_size(), grid.sharding_group_size if grid else get_local_size())
        file, hot_set = plan_file_of(plan, dist.get_world_size(), local, device.type, settings)
        for name, codecs in exchange.table_codecs.items():
            file.tables[name] = replace(file.tables[name], codecs=codecs)
    sharded: DistributedModelParallel
    thresholds = config.sharding.dense_gradients
    wrapper = None if thresholds is None else ThresholdedDataParallel(thresholds)
    if grid is not None:
        sharded = GridModelParallel(
            model, grid, device, plan, sharders, data_parallel_wrapper=wrapper
        )
    else:
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            plan=plan,
            sharders=sharders,
            device=device,
            data_parallel_wrapper=wrapper,
        )
    initialize_tables(sharded, config.seed)
    return sharded, (file, hot_set)


def _planned(
    model: DLRMTrain,
    config: TrainConfig,
    source: Source,
    device: torch.device,
    sharders: list[ModuleSharder[nn.Module]],
    grid: GridOptions | None,
) -> ShardingPlan:
    """Returns the planner's plan for the sharding types that the configuration asks for."""
    ranks = dist.get_world_size() if grid is None else grid.sharding_group_size
    poolings = {name: table.pooling for table in config.tables for name in copies_of(table)}
    if isinstance(source, PreparedData):
        poolings = source.poolings
    planner = FusedShardingPlanner(
        topology=Topology(
            world_size=ranks,
            local_world_size=min(get_local_size(), ranks),
            compute_device=device.type,
        ),
        sharding_group_size=None if grid is None else grid.sharding_group_size,
        batch_size=config.data.batch_size // dist.get_world_size(),
        constraints={
            name: _constraints(
                config.sharding.tables.get(name, config.sharding.type),
                device,
                [poolings.get(f, 1.0) for f, table in source.features.items() if table == name],
            )
            for name in source.table_rows
        },
    )
    return planner.collective_plan(model, sharders, dist.group.WORLD)


def _constraints(
    sharding_type: str, device: torch.device, poolings: list[float]
) -> ParameterConstraints:
    """Returns what the planner must keep to for a table."""
    if sharding_type == "data_parallel":
        return ParameterConstraints(
            sharding_types=["data_parallel"], compute_kernels=["dense"], pooling_factors=poolings
        )
    kernels = ["fused"] if device.type == "cpu" else ["fused", "fused_uvm_caching", "fused_uvm"]
    types = MODEL_PARALLEL if sharding_type == "auto" else [sharding_type]
    return ParameterConstraints(
        sharding_types=types, compute_kernels=kernels, pooling_factors=poolings
    )
