"""Files with any columns to batches: what comes out is what stood in the files."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.training.data import lines as lines_module
from fusedrec_torchrec.training.data import preparation, table_files, table_source
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.prepare import prepare_table
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.table_options import (
    CsvOptions,
    RowsOptions,
    SparseOptions,
    SplitOptions,
    TimestampOptions,
)
from fusedrec_torchrec.training.data.vocabulary import MISSING, RARE, RESERVED
from tests.training.data.table_text import options, write_csv, write_table, write_text

Row = dict[str, Any]
FORMATS = ("a.parquet", "a.feather", "a.arrow", "a.stream.arrow", "a.csv", "a.tsv.gz", "a.csv.zst")
NAMES = ("clicked", "price", "user", "word", "tags", "weights")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0|"), min_size=1, max_size=6)
SPARSE = {
    "user": SparseOptions(table="ids"),
    "word": SparseOptions(),
    "tags": SparseOptions(table="ids", bag=True, weights="weights"),
}
ROWS = st.fixed_dictionaries(
    {
        "clicked": st.booleans(),
        "price": st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)),
        "user": st.one_of(st.none(), st.integers(0, 9), st.integers(-(2**63), 2**63 - 1)),
        "word": st.one_of(st.none(), st.sampled_from("abc"), WORDS),
        "tags": st.one_of(
            st.none(),
            st.lists(
                st.tuples(
                    st.one_of(st.none(), st.integers(0, 9)),
                    st.floats(-100, 100, width=32).map(float),
                ),
                max_size=4,
            ),
        ),
    }
)


def prepared(tmp_path: Path, *files: Path, **settings: Any) -> PreparedData:
    return prepare_table(options(*files, **settings), tmp_path / "out", progress=False)


def write_rows(path: Path, rows: list[Row], header: bool) -> dict[str, Any]:
    """Writes rows in the format of the name; returns the settings that it needs."""
    tags = [row["tags"] for row in rows]
    ids = [None if bag is None else [tag for tag, _ in bag] for bag in tags]
    weights = [None if bag is None else [weight for _, weight in bag] for bag in tags]
    columns = {name: [row[name] for row in rows] for name in NAMES[:4]}
    if ".csv" not in path.name and ".tsv" not in path.name:
        types = (pa.bool_(), pa.float64(), pa.int64(), pa.string())
        arrays = dict(zip(NAMES, map(pa.array, columns.values(), types), strict=False))
        arrays["tags"] = pa.array(ids, pa.list_(pa.int32()))
        arrays["weights"] = pa.array(weights, pa.large_list(pa.float32()))
        write_table(path, arrays, rows=7)
        return {"sparse": SPARSE}
    text = io.StringIO()
    delimiter = "\t" if ".tsv" in path.name else ","
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    if header:
        writer.writerow(NAMES)
    for row, bag, own in zip(rows, ids, weights, strict=True):
        cells = [int(row["clicked"]), *(row[name] for name in NAMES[1:4])]
        joined = [
            "" if part is None else "|".join("" if v is None else str(v) for v in part)
            for part in (bag, own)
        ]
        writer.writerow(["" if cell is None else cell for cell in cells] + joined)
    write_text(path, text.getvalue())
    sparse = {**SPARSE, "tags": SparseOptions(
        table="ids", bag=True, separator="|", weights="weights"
    )}  # fmt: skip
    return {"sparse": sparse, "csv": CsvOptions(columns=[] if header else list(NAMES))}


def check_rows(rows: list[Row], data: PreparedData, min_count: int) -> None:
    """Compares batches with rows, value by value; equal values must have equal table rows."""
    loader = Loader(
        data, (0, len(rows)), batch_size=1, lanes=1, rank=0, world_size=1, shuffle=False
    )
    counts: dict[str, Counter[str]] = {"ids": Counter(), "word": Counter()}
    for row in rows:
        values = [tag for tag, _ in row["tags"] or [] if tag is not None]
        counts["ids"].update(str(v) for v in [row["user"], *values] if v is not None)
        counts["word"].update([row["word"]] if row["word"] else [])
    rows_of: dict[tuple[str, str], int] = {}

    def check_id(table: str, value: object, got: int) -> None:
        if counts[table][str(value)] < min_count:
            assert got == RARE
        else:
            assert RESERVED <= got < data.table_rows[table]
            assert rows_of.setdefault((table, str(value)), got) == got

    assert loader.batches == len(rows) == data.samples
    for row, batch in zip(rows, loader.read(0, len(rows)), strict=True):
        features = batch.sparse_features
        assert batch.labels.tolist() == [float(row["clicked"])]
        assert batch.dense_features.tolist() == [[np.float32(row["price"] or 0).item()]]
        for name, table in (("user", "ids"), ("word", "word")):
            (got,) = features[name].values().tolist()
            if row[name] in (None, ""):
                assert got == MISSING
            else:
                check_id(table, row[name], got)
        bag = [(tag, weight) for tag, weight in row["tags"] or [] if tag is not None]
        ids, weights = features["tags"].values().tolist(), features["tags"].weights().tolist()
        assert len(ids) == len(bag)
        assert weights == [np.float32(weight).item() for _, weight in bag]
        for (tag, _), got in zip(bag, ids, strict=True):
            check_id("ids", tag, got)
        assert features["user"].weights().tolist() == [1.0]
    kept = [(t, v) for t, c in counts.items() for v, n in c.items() if n >= min_count]
    assert len(set(rows_of.values())) <= len(rows_of)
    by_table = {t: [row for (own, _), row in rows_of.items() if own == t] for t in counts}
    for table, got_rows in by_table.items():
        assert len(set(got_rows)) == len(got_rows)  # one value, one row
        assert data.table_rows[table] == RESERVED + sum(t == table for t, _ in kept)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=30),
    name=st.sampled_from(FORMATS),
    header=st.booleans(),
    min_count=st.integers(1, 2),
)
@settings(max_examples=60)
def test_any_table_comes_out_of_the_loader_as_it_went_in(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    name: str,
    header: bool,
    min_count: int,
) -> None:
    folder = tmp_path_factory.mktemp("table")
    if ".csv" in name or ".tsv" in name:  # where nothing is like a list with nothing in it
        for row in rows:
            if row["tags"] and len(row["tags"]) == 1 and row["tags"][0][0] is None:
                row["tags"] = None
    settings = write_rows(folder / name, rows, header)
    data = prepared(
        folder, folder / name, label="clicked", dense=["price"], min_count=min_count, **settings
    )
    check_rows(rows, data, min_count)


def test_types_of_columns_are_all_ids(tmp_path: Path) -> None:
    """One value, in any type that can be an id, has one row of the shared table."""
    path = write_table(
        tmp_path / "a.parquet",
        {
            "y": pa.array([1, 0]),
            "int8": pa.array([7, 8], pa.int8()),
            "uint64": pa.array([7, 8], pa.uint64()),
            "text": pa.array(["7", "8"]),
            "large": pa.array(["7", "8"], pa.large_string()),
            "bytes": pa.array([b"7", b"8"]),
            "pandas": pa.array([7.0, 8.0]),
            "category": pa.array(["7", "8"]).dictionary_encode(),
            "list": pa.array([[7], [8]], pa.large_list(pa.int16())),
            "fixed": pa.array([[7], [8]], pa.list_(pa.int64(), 1)),
            "nothing": pa.array([None, None]),
        },
    )
    singles = ("int8", "uint64", "text", "large", "bytes", "pandas", "category", "nothing")
    sparse = {name: SparseOptions(table="ids") for name in singles}
    sparse |= {name: SparseOptions(table="ids", bag=True) for name in ("list", "fixed")}
    samples = prepared(tmp_path, path, label="y", sparse=sparse).read(0, 2)
    assert samples.lengths is not None and (samples.lengths == 1).all()
    ids = dict(zip(sparse, samples.ids.reshape(-1, 2).tolist(), strict=True))
    assert ids.pop("nothing") == [MISSING, MISSING]
    assert {tuple(rows) for rows in ids.values()} in ({(2, 3)}, {(3, 2)})


def test_times_are_parts_and_bounds(tmp_path: Path) -> None:
    """Whatever column a time stands in, its parts are the same."""
    moments = np.array(["2017-12-02T23:30:00", "2017-12-03T01:05:30"], "datetime64[s]")
    seconds = moments.astype(np.int64)
    columns = {
        "ts": pa.array(moments),
        "seconds": pa.array(seconds),
        "millis": pa.array(seconds * 1000),
        "iso": pa.array(["2017-12-02 23:30:00", "2017-12-03T01:05:30Z"]),
        "text": pa.array(["17120223:30:00", "17120301:05:30"]),
        "y": pa.array([0, 1]),
    }
    path = write_table(tmp_path / "a.parquet", columns)
    forms: dict[str, dict[str, Any]] = {
        "ts": {},
        "seconds": {"unit": "s"},
        "millis": {"unit": "ms"},
        "iso": {},
        "text": {"format": "%y%m%d%H:%M:%S"},
    }
    parts = ("hour", "minute", "weekday", "day", "month", "year", "hour_of_week", "time_of_day")
    for column, form in forms.items():
        made = options(
            path,
            label="y",
            dense=list(parts),
            sparse={"h": SparseOptions(column="hour")},
            timestamp=TimestampOptions(column=column, **form),
            times={part: part for part in parts},
            split=SplitOptions(by="time", start="2017-12-03"),
        )
        data = prepare_table(made, tmp_path / column, progress=False)
        assert data.held_out == 1
        dense = data.read(0, 2).dense
        assert dense[:, :7].tolist() == [
            [23, 30, 5, 2, 12, 2017, 5 * 24 + 23],
            [1, 5, 6, 3, 12, 2017, 6 * 24 + 1],
        ]
        assert dense[:, 7] == pytest.approx([0.97917, 0.04549], abs=1e-4)
    beijing = options(
        path, label="y", sparse={"y2": SparseOptions(column="y")}, dense=["hour"],
        timestamp=TimestampOptions(column="ts", utc_offset=8), times={"hour": "hour"},
        split=SplitOptions(by="time", start="2017-12-03 08:00:00"),
    )  # fmt: skip
    data = prepare_table(beijing, tmp_path / "beijing", progress=False)
    assert data.read(0, 2).dense.tolist() == [[7.0], [9.0]] and data.held_out == 1


def numbered(folder: Path, count: int = 100, **columns: Any) -> Path:
    names = {"y": [i % 2 for i in range(count)], "n": [float(i) for i in range(count)]}
    ids = {"item": [f"i{i % 7}" for i in range(count)]}
    return write_table(folder / "numbered.parquet", {**names, **ids, **columns}, rows=30)


ITEM = {"item": SparseOptions()}


def test_splits_put_what_is_held_out_at_the_end(tmp_path: Path) -> None:
    first, second = numbered(tmp_path), tmp_path / "second.parquet"
    write_table(
        second,
        {"y": [1] * 20, "n": [float(i) for i in range(100, 120)], "item": ["new"] * 20},
    )

    def numbers(name: str, **split: Any) -> tuple[list[int], list[int], PreparedData]:
        made = options(
            first, second, label="y", dense=["n"], sparse=ITEM, split=SplitOptions(**split)
        )
        data = prepare_table(made, tmp_path / name, progress=False)
        values = data.read(0, 120).dense[:, 0].astype(int).tolist()
        train = 120 - (data.held_out or 0)
        return values[:train], values[train:], data

    train, held_out, data = numbers("file", by="file", files=[str(tmp_path / "sec*.parquet")])
    assert (train, held_out) == (list(range(100)), list(range(100, 120)))
    # A value that only held-out samples have is none of the vocabulary.
    assert data.table_rows == {"item": RESERVED + 7}
    assert set(data.read(100, 120).ids.tolist()) == {RARE}
    train, held_out, _ = numbers("random", by="random", share=0.25)
    assert sorted(train + held_out) == list(range(120)) and train == sorted(train)
    assert 15 <= len(held_out) <= 45 and held_out == sorted(held_out)
    train, held_out, data = numbers("end")
    assert train == list(range(120)) and data.held_out is None


def test_hashed_tables_have_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    path = numbered(tmp_path, item=[None if i == 5 else f"i{i}" for i in range(100)])
    rows = {"item": RowsOptions(hash_rows=11)}
    data = prepared(tmp_path, path, label="y", sparse=ITEM, tables=rows)
    ids = data.read(0, 100).ids
    assert data.table_rows == {"item": 11} and ids[5] == MISSING
    assert set(np.delete(ids, 5).tolist()) == set(range(1, 11))
    assert not list((tmp_path / "out" / "vocabulary").iterdir())


def test_rules_of_tables_go_before_those_of_all(tmp_path: Path) -> None:
    path = numbered(tmp_path, count=40, other=[f"o{i % 20}" for i in range(40)])
    data = prepared(
        tmp_path, path, label="y", sparse={**ITEM, "other": SparseOptions()}, min_count=3,
        max_rows=5, tables={"other": RowsOptions(min_count=1, max_rows=100)},
    )  # fmt: skip
    assert data.table_rows == {"item": 5, "other": RESERVED + 20}


def test_numbers_are_standardized_by_the_training_samples(tmp_path: Path) -> None:
    values = [None if i == 3 else 1e9 + i for i in range(100)]
    path = numbered(tmp_path, big=values, same=[5.0] * 100)
    start = SplitOptions(by="random", share=0.2)
    data = prepared(
        tmp_path, path, label="y", dense=["big", "same", "n"], sparse=ITEM, split=start,
        transform="standardize", transforms={"n": "log"},
    )  # fmt: skip
    train = data.samples - (data.held_out or 0)
    dense = data.read(0, data.samples).dense
    order = np.rint(np.exp(dense[:, 2]) - 3).astype(int)
    known = dense[:train, 0][order[:train] != 3]
    assert known.mean() == pytest.approx(0, abs=1e-5) and known.std() == pytest.approx(1, abs=1e-3)
    assert dense[order == 3, 0].tolist() == [0.0] and set(dense[:, 1].tolist()) == {0.0}
    assert data.manifest["scales"]["same"] == {"mean": 5.0, "deviation": 1.0}


def test_bags_are_cut_and_empty_ones_stay(tmp_path: Path) -> None:
    rows = [["1", "a|b|c|d"], ["0", ""], ["1", "|"], ["0", "b"]]
    path = write_csv(tmp_path / "a.csv", rows, ["y", "tags"])
    sparse = {"tags": SparseOptions(bag=True, separator="|", max_ids=2)}
    samples = prepared(tmp_path, path, label="y", sparse=sparse).read(0, 4)
    assert samples.lengths is not None and samples.lengths.tolist() == [[2, 0, 0, 1]]
    assert samples.ids[1] == samples.ids[2]  # b
    assert samples.dense.shape == (4, 0)


# -- malformed rows ----------------------------------------------------------------------------


def test_malformed_lines_are_named_by_file_and_line(tmp_path: Path) -> None:
    lines = ["y,n,item", "1,2,a", "", "1,2", "0,x,a", "maybe,1,a", "0,inf,b", '1,3,"a,b"']
    lines += ['0,4,"un', '1,5,a"b', ",6,c", "0,7,d"]
    path = write_text(tmp_path / "a.csv", "".join(f"{line}\n" for line in lines))
    made: dict[str, Any] = {"label": "y", "dense": ["n"], "sparse": ITEM}
    with pytest.raises(ValueError, match=r"a\.csv:4: 2 columns, must be 3: y, n, item") as caught:
        prepared(tmp_path, path, **made)
    assert "(to skip and count malformed lines, use on_bad_line='skip')" in str(caught.value)
    data = prepared(tmp_path, path, on_bad_line="skip", **made)
    assert data.read(0, data.samples).dense[:, 0].tolist() == [2.0, 3.0, 7.0]
    bad = data.manifest["bad_lines"]
    assert bad["counts"] == {
        "wrong number of columns": 1,
        "bad quotes": 2,
        "bad number": 2,
        "bad label": 2,
    }
    problems = {int(e.split("csv:")[1].split(":")[0]): e for e in bad["examples"]}
    assert sorted(problems) == [4, 5, 6, 7, 9, 10, 11]
    assert problems[5] == f"{path}:5: column n is 'x', must be a finite number"
    assert problems[6].endswith(":6: column y is 'maybe', must be 0 or 1, true or false")
    assert problems[11].endswith(":11: column y is missing, must be 0 or 1, true or false")
    assert "neither opens nor closes a value" in problems[9]
    # Finished data is not taken for flawless.
    with pytest.raises(ValueError, match="was made with on_bad_line='skip', which left it out"):
        prepared(tmp_path, path, **made)


def test_malformed_rows_are_named_by_file_and_row(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "a.parquet",
        {
            "y": [1, 0, 1, 0, 2, 1],
            "tags": pa.array([["a"], ["a", "b"], None, [], ["c"], ["d"]]),
            "w": pa.array([[1.0], [1.0], None, None, [1.0], [float("nan")]]),
            "id": [1.0, 2.0, 3.0, 4.5, 5.0, 6.0],
        },
        rows=2,
    )
    sparse = {"tags": SparseOptions(bag=True, weights="w"), "id": SparseOptions()}
    skip = prepared(tmp_path, path, label="y", sparse=sparse, on_bad_line="skip")
    assert skip.samples == 2
    assert [example.split("parquet:")[1] for example in skip.manifest["bad_lines"]["examples"]] == [
        "row 2: column w has 1 weights, must be 2, one for each id of tags",
        "row 4: column id is 4.5, must be an id: a text, a whole number, a boolean or a time",
        "row 5: column y is 2, must be 0 or 1, true or false",
        "row 6: column w is [nan], must be a list of finite numbers",
    ]


def test_a_truncated_file_gives_what_it_has(tmp_path: Path) -> None:
    rows = [[str(i % 2), f"user {i * i}"] for i in range(30_000)]
    path = write_csv(tmp_path / "a.csv.zst", rows, ["y", "user"])
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    made: dict[str, Any] = {"label": "y", "sparse": {"user": SparseOptions()}, "part_rows": 10_000}
    with pytest.raises(ValueError, match=r"a\.csv\.zst:\d+: (truncated|damaged) zstd"):
        prepared(tmp_path, path, **made)
    assert prepared(tmp_path, path, on_bad_line="skip", **made).samples > 5000
    other = numbered(tmp_path)
    other.write_bytes(other.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"numbered\.parquet is damaged: .*; write the file anew"):
        prepare_table(options(other, label="y", sparse=ITEM), tmp_path / "x", progress=False)


# -- errors ------------------------------------------------------------------------------------


def test_mistakes_are_named_with_what_is_there(tmp_path: Path) -> None:
    path = numbered(
        tmp_path, tags=[["a"]] * 100, when=list(range(100)), thing=[{"a": 1}] * 100, w=[[1.0]] * 100
    )
    there = "there are y, n, item, tags, when, thing, w"
    sparse = SparseOptions
    for changes, problem in (
        ({"label": "z"}, f"data.table.label names column 'z', which {path} does not have; {there}"),
        ({"label": "y +"}, "data.table.label is neither a column nor an expression: 'y +' is no"),
        ({"label": "y +"}, "allowed are a column of 0 and 1, COLUMN == VALUE"),
        ({"label": "tags"}, "is list<element: string>, must be a number, a text or a boolean"),
        (
            {"dense": ["m"]},
            f"data.table.dense names column 'm', which {path} does not have; {there}",
        ),
        ({"dense": ["tags"]}, "dense: column 'tags' of"),
        ({"dense": ["thing"]}, "is struct<a: int64>, must be a number, a boolean, a time or text"),
        ({"sparse": {"x": sparse()}}, "data.table.sparse.x names column 'x', which"),
        ({"sparse": {"tags": sparse()}}, "must be a single id: text, integer, float"),
        ({"sparse": {"tags": sparse()}}, "for lists write bag: true"),
        ({"sparse": {"thing": sparse()}}, "is struct<a: int64>, must be a single id"),
        ({"sparse": {"item": sparse(bag=True)}}, "must be a list, or text with a separator"),
        ({"sparse": {"t": sparse(column="tags", bag=True, weights="q")}}, "sparse.t.weights names"),
        ({"timestamp": TimestampOptions(column="q")}, "data.table.timestamp names column 'q'"),
        ({"timestamp": TimestampOptions(column="when")}, "data.table.timestamp.unit is missing"),
        (
            {"timestamp": TimestampOptions(column="when", unit="s"), "times": {"n": "hour"}},
            f"data.table.times has 'n', which is a column of {path} already",
        ),
        (
            {"split": SplitOptions(by="file", files=[str(tmp_path / "no*")])},
            "data.table.split.files: pattern",
        ),
    ):
        made = {"label": "y", "sparse": ITEM, **changes}
        with pytest.raises(ValueError, match=r"data\.table") as caught:
            prepared(tmp_path, path, **made)
        assert problem in str(caught.value)
    other = write_table(tmp_path / "other.parquet", {"y": [1], "item": ["a"]})
    outside = SplitOptions(by="file", files=[str(other)])
    with pytest.raises(ValueError, match=r"split.files names .*other.parquet, which is none of"):
        prepared(tmp_path, path, label="y", sparse=ITEM, split=outside)
    with pytest.raises(ValueError, match=r"dense names column 'n', which .*other.parquet does not"):
        prepared(tmp_path, path, other, label="y", dense=["n"], sparse=ITEM)
    far = SplitOptions(by="random", share=1 - 1e-12)
    with pytest.raises(ValueError, match="all samples are held out in"):
        prepared(tmp_path, path, label="y", sparse=ITEM, split=far)
    assert not (tmp_path / "out" / "manifest.json").exists()


# -- going on, and memory ----------------------------------------------------------------------


class StoppedError(Exception):
    pass


def text_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    rows = [[str(i % 2), str(i), f"u{i % 31}", f"t{i % 3}|t{i % 5}"] for i in range(400)]
    path = write_csv(folder / "a.csv.gz", [*rows[:50], ["bad"], *rows[50:]])
    return path, {
        "csv": CsvOptions(columns=["y", "n", "user", "tags"]),
        "sparse": {
            "user": SparseOptions(),
            "tags": SparseOptions(bag=True, separator="|"),
        },
    }


def column_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    columns = {
        "y": [i % 2 for i in range(400)],
        "n": list(range(400)),
        "user": [None if i == 50 else f"u{i % 31}" for i in range(400)],
        "tags": [[f"t{i % 3}", f"t{i % 5}"] for i in range(400)],
    }
    path = write_table(folder / "a.parquet", columns, rows=90)
    return path, {"sparse": {"user": SparseOptions(), "tags": SparseOptions(bag=True)}}


@pytest.mark.parametrize("stop_at", [2, 5, 9, 17, 22])
@pytest.mark.parametrize("made", [text_file, column_file])
def test_a_stopped_preparation_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[Path], tuple[Path, dict[str, Any]]],
    stop_at: int,
) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(table_files, "READ_ROWS", 25)
    path, settings = made(tmp_path)
    settings |= {"label": "y", "dense": ["n"], "on_bad_line": "skip", "transform": "standardize"}
    settings["split"] = SplitOptions(by="random", share=0.3)
    straight = prepare_table(options(path, **settings), tmp_path / "straight", progress=False)
    written, replace = 0, Path.replace

    def stopping(self: Path, target: Any) -> Path:
        nonlocal written
        written += 1
        if written == stop_at:
            raise StoppedError
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopping)
        with pytest.raises(StoppedError):
            prepared(tmp_path, path, **settings)
    resumed = prepared(tmp_path, path, **settings)
    assert resumed.manifest == straight.manifest and resumed.samples == 400
    ours, theirs = resumed.read(0, 400), straight.read(0, 400)
    assert (ours.ids == theirs.ids).all() and (ours.dense == theirs.dense).all()


def test_other_settings_are_refused_and_files_may_go(tmp_path: Path) -> None:
    path = numbered(tmp_path)
    prepared(tmp_path, path, label="y", sparse=ITEM)
    with pytest.raises(ValueError, match="prepared otherwise: label='y', now label='n > 3'"):
        prepared(tmp_path, path, label="n > 3", sparse=ITEM)
    path.unlink()
    assert prepared(tmp_path, path, label="y", sparse=ITEM).samples == 100
    with pytest.raises(ValueError, match="prepared otherwise: min_count=1, now min_count=2"):
        prepared(tmp_path, path, label="y", sparse=ITEM, min_count=2)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream.arrow", "a.feather", "a.csv"])
def test_no_more_rows_are_held_than_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However many a file has, or a group or batch of it."""
    monkeypatch.setattr(table_files, "READ_ROWS", 50)
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 512)
    columns = {"y": [0, 1] * 2000, "item": [f"i{i % 13}" for i in range(4000)]}
    path = tmp_path / name
    if name == "a.csv":
        rows = [[str(y), item] for y, item in zip(*columns.values(), strict=True)]
        write_csv(path, rows, ["y", "item"])
    else:
        write_table(path, columns, rows=4000)
    blocks: list[int] = []
    read = table_source.TableSource._samples

    def watched(self: Any, rows: Any, *arguments: Any) -> Any:
        blocks.append(len(rows.places))
        return read(self, rows, *arguments)

    monkeypatch.setattr(table_source.TableSource, "_samples", watched)
    data = prepared(tmp_path, path, label="y", sparse=ITEM, part_rows=200)
    assert data.samples == 4000 and max(blocks) <= 100
    assert max(part["samples"] for part in data.manifest["parts"]) <= 200 + max(blocks)


def test_long_bags_make_shorter_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "READ_ROWS", 10)
    monkeypatch.setattr(preparation, "PART_BYTES", 40_000)
    bags = [[f"t{i}" for i in range(200)]] * 100
    path = write_table(tmp_path / "a.parquet", {"y": [0, 1] * 50, "tags": bags})
    sparse = {"tags": SparseOptions(bag=True)}
    data = prepared(tmp_path, path, label="y", sparse=sparse, part_rows=1000)
    assert len(data.manifest["parts"]) >= 4


def test_the_manifest_says_what_features_are(tmp_path: Path) -> None:
    path, settings = column_file(tmp_path)
    data = prepared(tmp_path, path, label="y", **settings)
    described = json.loads((tmp_path / "out" / "manifest.json").read_text())["features"]
    assert described == {
        "user": {"table": "user", "bag": False, "weights": False},
        "tags": {"table": "tags", "bag": True, "weights": False, "ids": 800},
    }
    assert data.poolings == {"user": 1.0, "tags": 2.0}
    assert data.features == {"user": "user", "tags": "tags"} and not data.weighted
