"""Prepares Criteo's text as parquet that trains at full speed: ``fusedrec prepare``.

Three stages, each streaming: text to columns (dense values transformed), a vocabulary for each
categorical column, values to table rows.  Every file appears under its name only when it is
complete, so a run that was stopped or failed goes on where it was; one of other text or with other
options begins anew.
"""

import hashlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from fusedrec_torchrec.core.files import file_lock, naming, write_json
from fusedrec_torchrec.core.json_file import parse_json
from fusedrec_torchrec.training.data.criteo import (
    CATEGORIES,
    INTEGERS,
    LABEL,
    BadLines,
    RawColumns,
    read,
)
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.data.lines import TextFile, find_files
from fusedrec_torchrec.training.data.parquet import open_parquet, reading, write_parquet
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import VERSION, PreparedData
from fusedrec_torchrec.training.data.spelling import Spelling, as_argument
from fusedrec_torchrec.training.data.vocabulary import (
    RESERVED,
    build_vocabulary,
    read_vocabulary,
    rows_of,
)

__all__ = ["prepare"]

REMOVED = "work.removed"


def prepare(
    paths: Sequence[str | Path],
    output: str | Path,
    options: PrepareOptions | None = None,
    progress: bool = True,
    spelling: Spelling = as_argument,
) -> PreparedData:
    """Prepares text files into the folder ``output``; at once if that was done before.

    Several processes may call it for the same folder: one works, the others wait for it.

    Args:
        paths: text files, or folders of them.
        output: folder of the prepared data.
        options: how text becomes parquet.
        progress: whether to show bars.
        spelling: how messages spell a setting for whoever reads them.

    Raises:
        ValueError: files missing, empty or malformed, or ``output`` holds something else.
        OSError: a file that cannot be read or written, by its name.
    """
    if (Path(output) / MANIFEST).is_file() and not any(Path(path).exists() for path in paths):
        return _prepared_before(paths, Path(output))  # the text is not needed any more
    files = find_files(paths)
    options = options or PrepareOptions()
    return _Preparation(files, Path(output), options, progress, spelling).run()


class _Preparation:
    """Is a preparation, which goes on where one that was stopped was."""

    def __init__(
        self,
        files: list[TextFile],
        output: Path,
        options: PrepareOptions,
        progress: bool,
        spelling: Spelling,
    ) -> None:
        self._files = files
        self._output = output
        self._work = output / "work"
        self._options = options
        self._progress = progress
        self._spelling = spelling
        self._remedy = f"remove {output} and prepare it anew"
        self._identity: dict[str, Any] = {
            "version": VERSION,
            "sources": [
                {
                    "name": file.path.name,
                    "bytes": file.path.stat().st_size,
                    "digest": _digest(file.path),
                }
                for file in files
            ],
            "options": {
                key: value
                for key, value in asdict(options).items()
                if key not in ("memory_mb", "on_bad_line")
            },
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
            parts = self._rows(tables)
            self._finish(tables, parts, bad_lines)
        return PreparedData.open(self._output)

    def _finished(self) -> PreparedData:
        done = PreparedData.open(self._output)
        changes = self._changes(done.manifest["identity"])
        if changes:
            raise ValueError(
                f"{self._output} holds data that was prepared otherwise: {'; '.join(changes)}. "
                "Choose another folder, or remove this one to prepare it anew"
            )
        self._refuse_bad_lines(done.manifest["bad_lines"]["examples"])
        return done

    def _refuse_bad_lines(self, examples: list[str]) -> None:
        """Refuses data whose malformed lines were left out, if that is not allowed now."""
        if examples and self._options.on_bad_line == "error":
            skip = self._spelling("on_bad_line", "skip")
            raise ValueError(
                f"{examples[0]}; {self._output} was made with {skip}, which left it out. Say so "
                "again, or remove the folder to prepare it anew"
            )

    def _changes(self, then: dict[str, Any]) -> list[str]:
        """Returns what was different when this folder was prepared before."""
        options = then.get("options", {})
        changes = [
            f"{self._spelling(key, options.get(key))}, now {self._spelling(key, value)}"
            for key, value in self._identity["options"].items()
            if options.get(key) != value
        ]
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

    # -- stage 1: text to columns --------------------------------------------------------------

    def _columns(self) -> BadLines:
        """Writes raw-N.parquet; beside each raw-N.json says where in the text it ends."""
        policy = self._options.on_bad_line
        done = sorted(self._work.glob("raw-*.json"))
        state: dict[str, Any] = {"file": 0, "end": 0, "line": 1}
        if done:
            state = self._state(done[-1])
        bad: Any = state.get("bad_lines", {"counts": {}, "examples": []})
        skip = self._spelling("on_bad_line", "skip")
        bad_lines = BadLines(policy, Counter(bad["counts"]), list(bad["examples"]), skip)
        self._refuse_bad_lines(bad_lines.examples)
        number = len(done)
        sizes = [file.path.stat().st_size for file in self._files]
        with tqdm(
            total=sum(sizes),
            unit="B",
            unit_scale=True,
            desc="reading text",
            disable=not self._progress,
        ) as bar:
            waiting: list[RawColumns] = []
            position = (state["file"], state["end"], state["line"])
            if state.get("finished"):
                return bad_lines
            for index in range(position[0], len(self._files)):
                start, line = (position[1], position[2]) if index == position[0] else (0, 1)
                for columns, block in read(self._files[index], bad_lines, start, line):
                    waiting.append(columns)
                    bar.n = sum(sizes[:index]) + block.packed
                    bar.set_postfix(bad_lines=bad_lines.total, refresh=False)
                    bar.refresh()
                    if sum(map(len, waiting)) >= self._options.part_rows:
                        end = (index, block.end, block.first_line + block.data.count(b"\n"))
                        self._write_raw(number, waiting, end, bad_lines)
                        number, waiting = number + 1, []
            self._write_raw(number, waiting, (len(self._files), 0, 1), bad_lines, finished=True)
        return bad_lines

    def _write_raw(
        self,
        number: int,
        columns: list[RawColumns],
        end: tuple[int, int, int],
        bad_lines: BadLines,
        finished: bool = False,
    ) -> None:
        rows = sum(map(len, columns))
        if rows:
            arrays: list[pa.Array] = [pa.array(np.concatenate([c.labels for c in columns]))]
            dense = self._dense(np.concatenate([c.integers for c in columns]))
            arrays += [pa.array(dense[:, i]) for i in range(len(INTEGERS))]
            values = np.concatenate([c.categories for c in columns])
            missing = np.concatenate([c.missing_categories for c in columns])
            arrays += [pa.array(values[:, i], mask=missing[:, i]) for i in range(len(CATEGORIES))]
            table = pa.table(arrays, names=[LABEL, *INTEGERS, *CATEGORIES])
            write_parquet(self._work / f"raw-{number:05d}.parquet", table, 1 << 17)
        write_json(
            self._work / f"raw-{number:05d}.json",
            {
                "file": end[0],
                "end": end[1],
                "line": end[2],
                "rows": rows,
                "finished": finished,
                "bad_lines": {"counts": bad_lines.counts, "examples": bad_lines.examples},
            },
        )

    def _dense(self, integers: NDArray[np.int64]) -> NDArray[np.float32]:
        if self._options.dense_transform == "log":
            return np.log(np.maximum(integers, -2) + 3.0).astype(np.float32)
        return integers.astype(np.float32)

    def _raw_files(self) -> list[Path]:
        files = sorted(self._work.glob("raw-*.parquet"))
        if not files:
            raise ValueError(
                f"no usable line in {', '.join(str(file.path) for file in self._files)}"
            )
        return files

    # -- stage 2: vocabularies -----------------------------------------------------------------

    def _vocabularies(self) -> dict[str, int]:
        """Writes a vocabulary for each column; returns the tables' rows."""
        raw_files = self._raw_files()
        folder = self._output / "vocabulary"
        folder.mkdir(exist_ok=True)
        tables = {}
        for name in tqdm(CATEGORIES, desc="counting values", disable=not self._progress):
            path = folder / f"{name}.npy"
            if path.exists():
                kept = len(read_vocabulary(path))
            else:
                with naming(path):
                    kept = build_vocabulary(
                        lambda name=name: self._present(raw_files, name),  # type: ignore[misc]
                        path,
                        self._options.min_count,
                        self._options.max_rows,
                        self._options.memory_mb << 20,
                    )
            tables[name] = kept + RESERVED
        return tables

    def _present(self, files: list[Path], name: str) -> Iterator[NDArray[np.uint32]]:
        """Yields the values of a column that are not missing."""
        for path in files:
            with reading(path, self._remedy), open_parquet(path) as file:
                for batch in file.iter_batches(1 << 17, columns=[name]):
                    yield batch.column(0).drop_null().to_numpy(zero_copy_only=False)

    # -- stage 3: values to rows ---------------------------------------------------------------

    def _rows(self, tables: dict[str, int]) -> list[dict[str, Any]]:
        """Writes part-N.parquet with rows in place of values; returns what they hold."""
        vocabularies = {
            name: read_vocabulary(self._output / "vocabulary" / f"{name}.npy") for name in tables
        }
        parts = []
        for raw in tqdm(self._raw_files(), desc="writing rows", disable=not self._progress):
            path = self._output / raw.name.replace("raw", "part")
            if not path.exists():
                with reading(raw, self._remedy):
                    table = pq.read_table(raw, page_checksum_verification=True)
                for name, vocabulary in vocabularies.items():
                    column = table[name].combine_chunks()
                    missing = column.is_null().to_numpy(zero_copy_only=False)
                    values = column.fill_null(0).to_numpy(zero_copy_only=False)
                    place = table.schema.get_field_index(name)
                    rows = pa.array(rows_of(values, missing, vocabulary))
                    table = table.set_column(place, name, rows)
                write_parquet(path, table, self._options.group_rows)
            with reading(path, self._remedy):
                parts.append({"file": path.name, "samples": pq.read_metadata(path).num_rows})
        return parts

    def _finish(
        self, tables: dict[str, int], parts: list[dict[str, Any]], bad_lines: BadLines
    ) -> None:
        clicks = 0
        for part in parts:
            with reading(self._output / part["file"], self._remedy):
                labels = pq.read_table(self._output / part["file"], columns=[LABEL])[LABEL]
            clicks += int(labels.to_numpy().sum())
        write_json(
            self._output / MANIFEST,
            {
                "identity": self._identity,
                "dense": INTEGERS,
                "tables": tables,
                "parts": parts,
                "samples": sum(part["samples"] for part in parts),
                "clicks": clicks,
                "bad_lines": {"counts": bad_lines.counts, "examples": bad_lines.examples},
            },
        )
        shutil.rmtree(self._work)


def _prepared_before(paths: Sequence[str | Path], output: Path) -> PreparedData:
    data = PreparedData.open(output)
    then = [source["name"] for source in data.manifest["identity"]["sources"]]
    now = [Path(path).name for path in paths]
    if then != now:
        raise ValueError(
            f"data file {paths[0]} does not exist, and {output} was prepared from {', '.join(then)}"
        )
    return data


def _digest(path: Path) -> str:
    """Returns a digest of a file's beginning and end, to tell files of the same size apart."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(path.stat().st_size - (1 << 20), 0))
        digest.update(file.read())
    return digest.hexdigest()[:16]
