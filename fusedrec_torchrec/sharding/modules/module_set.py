"""The modules that one set of sharders has sharded, which share their batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.sharding.modules.batches_ahead import BatchesAhead
from fusedrec_torchrec.sharding.modules.end_of_data import EndOfData, PipelinedModule

__all__ = ["ModuleSet"]


@dataclass
class ModuleSet:
    """What modules that share their batches must know of each other.

    One module alone cannot tell a wrong name from another module's: a batch may hold features of
    several modules, and options may name tables of several.

    Attributes:
        features: names of the features of all modules.
        tables: names of their fused tables.
    """

    features: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    _batches_ahead: BatchesAhead[PipelinedModule] = field(
        default_factory=lambda: BatchesAhead(EndOfData)
    )
    _env: object = None
    _paths: set[str | None] = field(default_factory=set)

    def add(
        self, module: PipelinedModule, features: Iterable[str], env: object, path: str | None
    ) -> BatchesAhead[PipelinedModule]:
        """Takes a module that is sharded now.

        A module is of another model than the ones before if it has another environment, the path
        of one of them, or is sharded after their first batch.

        Args:
            module: the module.
            features: its features.
            env: the environment that it is sharded in.
            path: where it is in its model.

        Returns:
            what counts the batches of all modules of the model.
        """
        self.features.update(features)
        if env is not self._env or path in self._paths or self._batches_ahead.has_begun:
            self._env, self._paths = env, set()
            self._batches_ahead = BatchesAhead(EndOfData)
        self._paths.add(path)
        self._batches_ahead.register(module)
        return self._batches_ahead

    def add_fused_tables(self, names: Iterable[str]) -> None:
        """Takes the fused tables of a module."""
        self.tables.update(names)

    def check(self, options: ExchangeOptions, hot: HotOptions) -> None:
        """Refuses options that name tables which no module has; when all modules are sharded."""
        hashed = () if isinstance(options.hash_ids, bool) else options.hash_ids
        for name, tables in (
            ("hash_ids", hashed),
            ("hot.tables", hot.tables),
            ("table_codecs", options.table_codecs),
        ):
            unknown = sorted(set(tables) - self.tables)
            if unknown:
                raise ValueError(
                    f"{name} names table {unknown[0]!r}, must be among the fused tables "
                    f"{sorted(self.tables)}"
                )
