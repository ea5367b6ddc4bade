"""Ways in which a file of prepared data can be damaged."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Damage = Callable[[Path], None]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("these are no columns " * 100)


def removed(path: Path) -> None:
    path.unlink()


def without_a_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["cat_3"]), path)


def with_a_column_twice(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.append_column("cat_3", table["cat_4"]), path)


def of_another_type(name: str, column: Callable[[pa.ChunkedArray], object]) -> Damage:
    def damage(path: Path) -> None:
        table = pq.read_table(path)
        place = table.schema.get_field_index(name)
        pq.write_table(table.set_column(place, name, column(table[name])), path)

    return damage


ids_in_lists = of_another_type("cat_3", lambda c: pa.array([[v] for v in c.to_pylist()]))
text_for_numbers = of_another_type("int_2", lambda c: pa.array([str(v) for v in c.to_pylist()]))
labels_of_text = of_another_type("label", lambda c: pa.array(["yes"] * len(c)))
ids_with_fractions = of_another_type("cat_0", lambda c: pa.array(np.full(len(c), 0.5)))


def with_fewer_rows(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 50), path)


def manifest_without_parts(path: Path) -> None:
    _change(path, lambda manifest: manifest.pop("parts"))


def manifest_with_other_samples(path: Path) -> None:
    _change(path, lambda manifest: manifest.update(samples=7))


def manifest_with_a_path(path: Path) -> None:
    _change(path, lambda manifest: manifest["parts"][0].update(file="../part-00000.parquet"))


def manifest_of_nothing(path: Path) -> None:
    (path.parent / "manifest.json").write_text("[]")


def _change(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    file = path.parent / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def one_bit(path: Path) -> None:
    """In the labels of each row group, so that only whoever reads them can find out."""
    metadata = pq.read_metadata(path)
    content = bytearray(path.read_bytes())
    for group in range(metadata.num_row_groups):
        column = metadata.row_group(group).column(0)
        content[column.data_page_offset + column.total_compressed_size - 2] ^= 1
    path.write_bytes(content)


# What there is to say about it.
VISIBLE: dict[str, tuple[Damage, str]] = {
    "truncated": (truncated, "part-00001.parquet is damaged: Parquet magic bytes not found"),
    "empty": (empty, "part-00001.parquet is damaged: Parquet file size is 0 bytes"),
    "text": (text, "part-00001.parquet is damaged: Parquet magic bytes not found"),
    "removed": (removed, "part-00001.parquet is missing"),
    "without_a_column": (without_a_column, "it has 0 columns 'cat_3', must have one"),
    "with_a_column_twice": (with_a_column_twice, "it has 2 columns 'cat_3', must have one"),
    "ids_in_lists": (ids_in_lists, "column 'cat_3' is list<"),
    "text_for_numbers": (text_for_numbers, "column 'int_2' is string, must be a floating point"),
    "labels_of_text": (labels_of_text, "column 'label' is string, must be an integer"),
    "ids_with_fractions": (ids_with_fractions, "column 'cat_0' is double, must be an integer"),
    "with_fewer_rows": (with_fewer_rows, "it has 50 rows, manifest.json says "),
    "manifest_without_parts": (manifest_without_parts, "manifest.json: parts is missing"),
    "manifest_with_other_samples": (manifest_with_other_samples, "samples is 7, the parts have"),
    "manifest_with_a_path": (
        manifest_with_a_path,
        "names '../part-00000.parquet', which is no file in its folder",
    ),
    "manifest_of_nothing": (manifest_of_nothing, "manifest.json is damaged"),
}
