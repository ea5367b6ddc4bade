"""The configuration files of a planning task, checked before anything is planned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.core.config import from_mapping, load_yaml, with_overrides
from fusedrec_torchrec.planner.config import PlannerConfig
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.training.config import TrainConfig

__all__ = ["PlannerFiles", "read_planner_files"]


@dataclass(frozen=True, kw_only=True)
class PlannerFiles:
    """Holds what the files of a planning task say.

    Attributes:
        config: the planner configuration.
        cluster: the cluster, with as many ranks as are planned for.
        train: the training configuration; None if the planner configuration lists tables.
        profile: how often rows are used; None if the planner configuration names no profile.
    """

    config: PlannerConfig
    cluster: ClusterConfig
    train: TrainConfig | None
    profile: AccessProfile | None


def read_planner_files(path: Path, overrides: Sequence[str] = ()) -> PlannerFiles:
    """Reads a planner configuration, and the cluster, training and profile that it names.

    Raises:
        ValueError: a file is missing, or something in it is unknown or out of range.
    """
    config = from_mapping(PlannerConfig, with_overrides(load_yaml(path), overrides), str(path))
    folder = path.parent
    cluster_path = folder / config.cluster
    cluster = from_mapping(ClusterConfig, load_yaml(cluster_path), str(cluster_path))
    train = None
    if config.train is not None:
        where = folder / config.train
        train = from_mapping(TrainConfig, load_yaml(where), str(where))
        launched = train.launch.ranks * train.launch.nodes
        cluster = _with_ranks(cluster, config.ranks or launched)
        if train.data.batch_size % cluster.ranks:
            raise ValueError(
                f"{where}: data.batch_size is {train.data.batch_size}, must be a multiple of "
                f"{cluster.ranks} ranks"
            )
    elif config.ranks is not None:
        cluster = _with_ranks(cluster, config.ranks)
    profile = None if config.profile is None else AccessProfile.load(folder / config.profile)
    return PlannerFiles(config=config, cluster=cluster, train=train, profile=profile)


def _with_ranks(cluster: ClusterConfig, ranks: int) -> ClusterConfig:
    per_node = cluster.ranks_per_node
    if ranks > per_node and ranks % per_node:
        raise ValueError(
            f"ranks is {ranks}, must be at most {per_node} or a multiple of it, the ranks of a "
            f"node of {cluster.name}"
        )
    return replace(cluster, ranks=ranks)
