"""What a sharder has decided for the fused tables of a module, as a part of the plan's entries.

TorchRec hands nothing but the plan to a sharding, so that is how the sharder's settings get there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ParameterSharding

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.codecs.registry import RegistryCodecs
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.hot.options import HotOptions, HotRule
from fusedrec_torchrec.sharding.plan_entries import FusedParameterSharding
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["ModuleSettings", "ProcessedFeatures", "resolve_plan", "settings_of"]


@dataclass(frozen=True)
class ProcessedFeatures:
    """Features whose weights come from feature processors, not from the batch.

    Attributes:
        max_lengths: how many ids a bag may have, by feature: as many as there are weights for
            positions.
    """

    max_lengths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModuleSettings:
    """What all fused tables of a module have in common.

    Attributes:
        options: how ids, rows and gradients travel.
        hot: hot rows; ``hot.tables`` has the rules of the plan, too, and no other tables.
        processed: feature processors of the module; None if it has none.
    """

    options: ExchangeOptions
    hot: HotOptions
    processed: ProcessedFeatures | None = None


@dataclass
class ResolvedParameterSharding(FusedParameterSharding):
    """A table's part of a plan, with nothing left to decide."""

    settings: ModuleSettings | None = None


def resolve_plan(
    plan: Mapping[str, ParameterSharding],
    options: ExchangeOptions,
    hot: HotOptions,
    registry_codecs: RegistryCodecs | None,
    processed: ProcessedFeatures | None,
) -> dict[str, ParameterSharding]:
    """Returns the plan of a module, its fused entries with all that the sharder has to say.

    Args:
        plan: by table.
        options: the sharder's, which give way to what the plan says of ``input_dist``.
        hot: the sharder's, which go before the rules of the plan.
        registry_codecs: of the sharder's ``qcomm_codecs_registry``.
        processed: feature processors of the module; None if it has none.

    Raises:
        ValueError: tables of the module want different things.
    """
    fused = {name: entry for name, entry in plan.items() if entry.sharding_type in FUSED_TYPES}
    rules = {name: _hot_rule(entry, hot.tables.get(name)) for name, entry in fused.items()}
    settings = ModuleSettings(
        options=_planned(fused, options),
        hot=replace(hot, tables={name: rule for name, rule in rules.items() if rule is not None}),
        processed=processed,
    )
    resolved = dict(plan)
    for name, entry in fused.items():
        given = {f.name: getattr(entry, f.name) for f in fields(entry)}
        given["codecs"] = (
            options.table_codecs.get(name)
            or given.get("codecs")
            or options.codecs
            or registry_codecs
        )
        resolved[name] = ResolvedParameterSharding(**given, settings=settings)
    return resolved


def settings_of(infos: list[EmbeddingShardingInfo]) -> ModuleSettings:
    """Returns the settings of a module's fused tables."""
    entry = infos[0].param_sharding
    assert isinstance(entry, ResolvedParameterSharding) and entry.settings is not None, (
        "fused tables are sharded by the sharders of this package"
    )
    return entry.settings


def codecs_of(info: EmbeddingShardingInfo) -> Codecs | RegistryCodecs | None:
    """Returns the codecs of a table; None if its rows travel as they are."""
    entry = info.param_sharding
    assert isinstance(entry, FusedParameterSharding)
    if isinstance(entry.codecs, Codecs) and entry.codecs.are_exact:
        return None
    return entry.codecs


# Entries of hand-written plans may be TorchRec's own, which say nothing of hot rows and input_dist.


def _hot_rule(entry: ParameterSharding, of_sharder: HotRule | None) -> HotRule | None:
    if of_sharder is None and isinstance(entry, FusedParameterSharding):
        return entry.hot_rows
    return of_sharder


def _planned(plan: Mapping[str, ParameterSharding], options: ExchangeOptions) -> ExchangeOptions:
    """Returns the settings of the exchange, where the plan has its own."""
    wanted = {
        entry.input_dist: name
        for name, entry in plan.items()
        if isinstance(entry, FusedParameterSharding) and entry.input_dist is not None
    }
    if len(wanted) > 1:
        tables = " and ".join(f"{name!r} {how!r}" for how, name in wanted.items())
        raise ValueError(
            f"the plan has input_dist of table {tables}, must be the same for all fused tables of "
            "a module"
        )
    return replace(options, input_dist=next(iter(wanted))) if wanted else options
