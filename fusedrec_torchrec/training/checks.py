"""What can be wrong with a run, as far as it can be found without torch.

Settings that contradict each other or this machine come first, then the data, then the files and
tables that settings name, then the sharding.  ``device`` and ``check_plan`` find the rest.
"""

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.core.config import check_is_file
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.training.check_sharding import check_sharding, tables_named
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.split import split
from fusedrec_torchrec.training.network import interface_called
from fusedrec_torchrec.training.source import hot_samples, open_source

__all__ = ["check_data", "check_settings", "open_data"]


def open_data(config: TrainConfig, ranks: int, progress: bool) -> Source:
    """Opens the data of a run after its settings are checked, and checks the run against the data.

    Args:
        config: of the run.
        ranks: that share the lanes of a batch.
        progress: whether to show bars where text must be prepared.

    Raises:
        ValueError: what is wrong, and with which setting.
    """
    check_settings(config, ranks)
    source = open_source(config, progress)
    check_data(config, source)
    return source


def check_data(config: TrainConfig, source: Source) -> None:
    """Checks a run against its data.

    Raises:
        ValueError: what is wrong, and with which setting.
    """
    if config.data.source != "python":  # whose samples nobody has counted
        _check_samples(config, source)
    _check_tables(config, source)
    check_sharding(config, source.table_rows)
    if config.data.hot_batches.order == "separated":
        hot_samples(config, source)


def check_settings(config: TrainConfig, ranks: int) -> None:
    """Checks settings that contradict each other or this machine.

    Raises:
        ValueError: what is wrong, and with which setting.
    """
    if config.launch.interface is not None:
        interface_called(config.launch.interface)
    if config.data.lanes % ranks:
        raise ValueError(
            f"data.lanes is {config.data.lanes}, must be a multiple of the number of ranks, {ranks}"
        )
    if config.data.source == "python" and config.data.hot_batches.order != "mixed":
        raise ValueError(
            f"data.hot_batches.order is {config.data.hot_batches.order}, must be mixed where "
            "data.source is python: batches come as they are"
        )
    grid = config.sharding.grid
    if grid is not None:
        all_ranks = config.launch.ranks * config.launch.nodes
        try:
            grid.groups(all_ranks)
        except ValueError as error:
            raise ValueError(f"sharding.grid: {error}") from None
        if config.sharding.hot != HotOptions():
            raise ValueError(
                "sharding.hot and sharding.grid are both set: hot rows are not supported with 2D "
                "parallelism; leave out one of them"
            )
        if config.sharding.early_rows:
            raise ValueError(
                "sharding.early_rows and sharding.grid are both set: a sync of the groups changes "
                "rows that no batch of a group asks for; leave out one of them"
            )
    if config.sharding.early_rows and config.launch.device == "cuda":
        raise ValueError(
            "sharding.early_rows is true and launch.device is cuda, must be false there: rows "
            "arrive early on cpu only"
        )
    if config.plan is not None:
        check_is_file(config.plan)


def _check_samples(config: TrainConfig, source: Source) -> None:
    (_, samples), (_, held_out) = split(source, config.data.held_out)
    if samples < config.data.batch_size:
        raise ValueError(
            f"{samples} training samples do not fill one batch of data.batch_size "
            f"{config.data.batch_size}"
        )
    eval_size = config.data.eval_batch_size or config.data.batch_size
    if source.held_out is not None and held_out < eval_size:
        raise ValueError(
            f"data.table.split holds out {held_out} samples, which do not fill one evaluation "
            f"batch of {eval_size}: split otherwise, or set data.eval_batch_size to less"
        )
    if source.held_out is None and config.data.held_out and held_out < eval_size:
        raise ValueError(
            f"{held_out} held-out samples do not fill one evaluation batch of {eval_size}: set "
            "data.held_out to more, or to 0 for none, or data.eval_batch_size to less"
        )


def _check_tables(config: TrainConfig, source: Source) -> None:
    names = list(source.table_rows)
    for setting, tables in tables_named(config):
        for name in tables:
            if name not in names:
                raise ValueError(
                    f"{setting} names {name!r}, which is no table; there are {', '.join(names)}"
                )
    hot = config.sharding.hot
    if hot.hot_set is not None:
        HotSet.load(hot.hot_set).check(source.table_rows)
    if hot.profile is not None:
        AccessProfile.load(hot.profile).check(source.table_rows)
