"""The work of a preparation: three stages, each of them streaming.

Files to columns, a vocabulary for each table, values to table rows.  Every file appears under its
name only when it is complete, so a run that was stopped or failed goes on where it was; one of
other data or with other options begins anew.
"""

import hashlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from fusedrec_torchrec.core.files import file_lock, naming, write_json
from fusedrec_torchrec.core.json_file import parse_json
from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.dense_transform import Scale
from fusedrec_torchrec.training.data.file_names import LABEL, MANIFEST
from fusedrec_torchrec.training.data.parquet import open_parquet, reading, write_parquet
from fusedrec_torchrec.training.data.prepare_options import OnBadLine
from fusedrec_torchrec.training.data.prepared import VERSION, PreparedData
from fusedrec_torchrec.training.data.raw_source import Position, RawSamples, RawSource
from fusedrec_torchrec.training.data.spelling import Spelling
from fusedrec_torchrec.training.data.value_rows import ValueRows
from fusedrec_torchrec.training.data.vocabulary import RESERVED, build_vocabulary, read_vocabulary

__all__ = ["How", "Preparation", "changed_options", "prepared_otherwise"]

REMOVED = "work.removed"
READ_ROWS = 1 << 17
# Bags may be long: a part is written when it has so many bytes, however few its samples are.
PART_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class How:
    """Says how a preparation works, whatever it reads.

    Attributes:
        on_bad_line: what to do with malformed lines.
        part_rows: samples in one parquet file.
        group_rows: samples in a row group.
        memory_mb: about what counting may use.
        progress: whether to show bars.
        spelling: how messages spell a setting.
    """

    on_bad_line: OnBadLine
    part_rows: int
    group_rows: int
    memory_mb: int
    progress: bool
    spelling: Spelling


class Preparation:
    """Is a preparation, which goes on where one that was stopped was."""

    def __init__(self, source: RawSource, output: Path, how: How) -> None:
        self._source = source
        self._layout = source.layout
        self._output = output
        self._work = output / "work"
        self._how = how
        self._spelling = how.spelling
        self._remedy = f"remove {output} and prepare it anew"
        self._identity: dict[str, Any] = {
            "version": VERSION,
            "sources": [
                {"name": path.name, "bytes": path.stat().st_size, "digest": _digest(path)}
                for path in source.files
            ],
            "options": source.options,
        }

    def run(self) -> PreparedData:
        """Prepares the data, or waits for another process that does."""
        if self._output.exists() and not self._output.is_dir():
            raise ValueError(f"{self._output} is a file, must be a folder for the prepared data")
        self._output.mkdir(parents=True, exist_ok=True)
        if (self._output / MANIFEST).exists():
            return self._finished()
        with file_lock(self._output / ".lock"):
            if (self._output / MANIFEST).exists():
                return self._finished()  # by another process, in the meantime
            self._start_work()
            bad_lines = self._columns()
            tables = self._vocabularies()
            scales = self._scales()
            parts = self._rows(tables, scales)
            self._finish(tables, scales, parts, bad_lines)
        return PreparedData.open(self._output)

    def _finished(self) -> PreparedData:
        done = PreparedData.open(self._output)
        changes = self._changes(done.manifest["identity"])
        if changes:
            raise ValueError(prepared_otherwise(self._output, changes))
        self._refuse_bad_lines(done.manifest["bad_lines"]["examples"])
        return done

    def _refuse_bad_lines(self, examples: list[str]) -> None:
        """Refuses data whose malformed lines were left out, if that is not allowed now."""
        if examples and self._how.on_bad_line == "error":
            skip = self._spelling("on_bad_line", "skip")
            raise ValueError(
                f"{examples[0]}; {self._output} was made with {skip}, which left it out. Say so "
                "again, or remove the folder to prepare it anew"
            )

    def _changes(self, then: dict[str, Any]) -> list[str]:
        """Returns what was different when this folder was prepared before."""
        changes = changed_options(
            then.get("options", {}), self._identity["options"], self._spelling
        )
        if then.get("sources") != self._identity["sources"]:
            before, now = (
                ", ".join(f"{source['name']} ({source['bytes']} bytes)" for source in sources)
                for sources in (then.get("sources", []), self._identity["sources"])
            )
            same = "the text has changed since then"
            changes.append(f"{now}: {same}" if now == before else f"from {before}, now {now}")
        return changes

    def _start_work(self) -> None:
        shutil.rmtree(self._output / REMOVED, ignore_errors=True)
        state = self._work / "identity.json"
        if state.exists():
            changes = self._changes(self._state(state))
            if not changes:
                return
            print(
                f"{self._output} holds an unfinished preparation, which is begun anew: "
                f"{'; '.join(changes)}",
                file=sys.stderr,
            )
            self._clear()
        unrelated = [p.name for p in self._output.iterdir() if p.name not in (".lock", "work")]
        if unrelated:
            raise ValueError(
                f"{self._output} is not empty (it holds {unrelated[0]!r}); choose another folder"
            )
        self._work.mkdir(exist_ok=True)
        write_json(state, self._identity)

    def _clear(self) -> None:
        """Removes an unfinished preparation, which could go on as before at any time until then."""
        for path in self._output.glob("part-*.p*"):  # .parquet, .partial
            path.unlink()
        if (self._output / "vocabulary").exists():
            shutil.rmtree(self._output / "vocabulary")
        shutil.rmtree(self._work.rename(self._output / REMOVED))

    def _state(self, path: Path) -> dict[str, Any]:
        """Reads what an unfinished preparation wrote down."""
        state = parse_json(path.read_bytes(), path)
        if not isinstance(state, dict):
            raise ValueError(f"{path} is damaged: remove {self._output} and begin anew")
        return state

    # -- stage 1: files to columns -------------------------------------------------------------

    def _columns(self) -> BadLines:
        """Writes raw-N.parquet; beside each raw-N.json says where in the files it ends.

        Samples that the source holds out go into held-N.parquet instead.
        """
        done = sorted(self._work.glob("raw-*.json"))
        state: dict[str, Any] = self._state(done[-1]) if done else asdict(Position())
        bad: Any = state.get("bad_lines", {"counts": {}, "examples": []})
        skip = self._spelling("on_bad_line", "skip")
        bad_lines = BadLines(
            self._how.on_bad_line, Counter(bad["counts"]), list(bad["examples"]), skip
        )
        self._refuse_bad_lines(bad_lines.examples)
        if state.get("finished"):
            return bad_lines
        number = len(done)
        with tqdm(
            total=sum(path.stat().st_size for path in self._source.files),
            unit="B",
            unit_scale=True,
            desc="reading files",
            disable=not self._how.progress,
        ) as bar:
            waiting: list[RawSamples] = []
            position = Position(state["file"], state["end"], state["line"])
            for samples in self._source.read(position, bad_lines):
                waiting.append(samples)
                bar.n = samples.read
                bar.set_postfix(bad_lines=bad_lines.total, refresh=False)
                bar.refresh()
                if _is_full(waiting, self._how.part_rows):
                    self._write_raw(number, waiting, samples.position, bad_lines)
                    number, waiting = number + 1, []
            end = Position(len(self._source.files))
            self._write_raw(number, waiting, end, bad_lines, finished=True)
        return bad_lines

    def _write_raw(
        self,
        number: int,
        waiting: list[RawSamples],
        end: Position,
        bad_lines: BadLines,
        finished: bool = False,
    ) -> None:
        rows = 0
        for name, parts in (
            ("raw", [_part(samples, held_out=False) for samples in waiting]),
            ("held", [_part(samples, held_out=True) for samples in waiting]),
        ):
            parts = [part for part in parts if part.num_rows]
            if parts:
                table = pa.concat_tables(parts)
                write_parquet(self._work / f"{name}-{number:05d}.parquet", table, READ_ROWS)
                rows += table.num_rows
        write_json(
            self._work / f"raw-{number:05d}.json",
            {
                **asdict(end),
                "rows": rows,
                "finished": finished,
                "bad_lines": {"counts": bad_lines.counts, "examples": bad_lines.examples},
            },
        )

    def _raw_files(self, kind: str = "raw") -> list[Path]:
        files = sorted(self._work.glob(f"{kind}-*.parquet"))
        if not files and kind == "raw":
            names = ", ".join(map(str, self._source.files))
            held_out = "all samples are held out" if self._raw_files("held") else "no usable line"
            raise ValueError(f"{held_out} in {names}")
        return files

    # -- stage 2: vocabularies and scales ------------------------------------------------------

    def _vocabularies(self) -> dict[str, int]:
        """Writes a vocabulary for each table that has one; returns the tables' rows."""
        raw_files = self._raw_files()
        folder = self._output / "vocabulary"
        folder.mkdir(exist_ok=True)
        tables = {}
        for name, rule in tqdm(
            self._layout.tables.items(), desc="counting values", disable=not self._how.progress
        ):
            if rule.hash_rows is not None:
                tables[name] = rule.hash_rows
                continue
            path = folder / f"{name}.npy"
            if path.exists():
                kept = len(read_vocabulary(path))
            else:
                features = [f.name for f in self._layout.features if f.table == name]
                with naming(path):
                    kept = build_vocabulary(
                        lambda features=features: self._present(raw_files, features),  # type: ignore[misc]
                        path,
                        rule.min_count,
                        rule.max_rows,
                        self._how.memory_mb << 20,
                        self._layout.value_type,
                    )
            tables[name] = kept + RESERVED
        return tables

    def _present(self, files: list[Path], names: list[str]) -> Iterator[NDArray[Any]]:
        """Yields the values of columns that are not missing, those of bags one by one."""
        for path in files:
            with reading(path, self._remedy), open_parquet(path) as file:
                for batch in file.iter_batches(READ_ROWS, columns=names):
                    for column in batch.columns:
                        values = column.flatten() if pa.types.is_list(column.type) else column
                        yield values.drop_null().to_numpy(zero_copy_only=False)

    def _scales(self) -> dict[str, Scale]:
        """Returns means and deviations of the columns that are to be standardized."""
        return {
            name: Scale.of(self._present(self._raw_files(), [name]))
            for name in self._layout.standardized
        }

    # -- stage 3: values to rows ---------------------------------------------------------------

    def _rows(self, tables: dict[str, int], scales: dict[str, Scale]) -> list[dict[str, Any]]:
        """Writes part-N.parquet with rows in place of values; returns what they hold."""
        vocabularies = {
            name: None
            if rule.hash_rows is not None
            else read_vocabulary(self._output / "vocabulary" / f"{name}.npy")
            for name, rule in self._layout.tables.items()
        }
        parts = []
        files = [*self._raw_files(), *self._raw_files("held")]
        for raw in tqdm(files, desc="writing rows", disable=not self._how.progress):
            is_held = raw.name.startswith("held")
            name = raw.name.replace("held", "part-held") if is_held else raw.name
            path = self._output / name.replace("raw", "part")
            if not path.exists():
                with reading(raw, self._remedy):
                    table = pq.read_table(raw, page_checksum_verification=True)
                for column, scale in scales.items():
                    values = table[column].fill_null(float("nan")).to_numpy()
                    table = _with(table, column, pa.array(scale(values)))
                for feature in self._layout.features:
                    rows = ValueRows(vocabularies[feature.table], tables[feature.table])
                    column = rows.of(table[feature.name].combine_chunks(), feature)
                    table = _with(table, feature.name, column)
                write_parquet(path, table, self._how.group_rows)
            with reading(path, self._remedy):
                parts.append({"file": path.name, "samples": pq.read_metadata(path).num_rows})
        return parts

    def _finish(
        self,
        tables: dict[str, int],
        scales: dict[str, Scale],
        parts: list[dict[str, Any]],
        bad_lines: BadLines,
    ) -> None:
        clicks, ids = 0, Counter[str]()
        bags = [feature.name for feature in self._layout.features if feature.bag]
        for part in parts:
            with reading(self._output / part["file"], self._remedy):
                table = pq.read_table(self._output / part["file"], columns=[LABEL, *bags])
            clicks += int(table[LABEL].to_numpy().sum())
            for name in bags:
                ids[name] += sum(len(chunk.flatten()) for chunk in table[name].chunks)
        manifest = {
            "identity": self._identity,
            "dense": list(self._layout.dense),
            "tables": tables,
            "parts": parts,
            "samples": sum(part["samples"] for part in parts),
            "clicks": clicks,
            "bad_lines": {"counts": bad_lines.counts, "examples": bad_lines.examples},
        }
        if any(f.bag or f.table != f.name for f in self._layout.features):
            manifest["features"] = {
                f.name: {"table": f.table, "bag": f.bag, "weights": f.weights}
                | ({"ids": ids[f.name]} if f.bag else {})
                for f in self._layout.features
            }
        if scales:
            manifest["scales"] = {name: asdict(scale) for name, scale in scales.items()}
        if self._source.splits:
            manifest["held_out"] = sum(
                part["samples"] for part in parts if part["file"].startswith("part-held")
            )
        write_json(self._output / MANIFEST, manifest)
        shutil.rmtree(self._work)


def _is_full(waiting: list[RawSamples], part_rows: int) -> bool:
    return (
        sum(samples.columns.num_rows for samples in waiting) >= part_rows
        or sum(samples.columns.nbytes for samples in waiting) >= PART_BYTES
    )


def _part(samples: RawSamples, held_out: bool) -> pa.Table:
    """Returns the samples that are held out, or the others."""
    if samples.held_out is None:
        return samples.columns.slice(0, 0) if held_out else samples.columns
    return samples.columns.filter(pa.array(samples.held_out == held_out))


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    """Returns the table with another column in the place of one."""
    return table.set_column(table.schema.get_field_index(name), name, column)


def changed_options(then: dict[str, Any], now: dict[str, Any], spelling: Spelling) -> list[str]:
    """Returns which options were others, as texts."""
    return [
        f"{spelling(key, then.get(key))}, now {spelling(key, value)}"
        for key, value in now.items()
        if then.get(key) != value
    ]


def prepared_otherwise(output: Path, changes: list[str]) -> str:
    """Returns a message about a folder that holds other data than is wanted."""
    return (
        f"{output} holds data that was prepared otherwise: {'; '.join(changes)}. "
        "Choose another folder, or remove this one to prepare it anew"
    )


def _digest(path: Path) -> str:
    """Returns a digest of a file's beginning and end, to tell files of the same size apart."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(path.stat().st_size - (1 << 20), 0))
        digest.update(file.read())
    return digest.hexdigest()[:16]
