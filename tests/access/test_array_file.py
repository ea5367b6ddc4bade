"""Hot sets, access profiles, vocabularies and prepared data that somebody else made."""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.vocabulary import read_vocabulary

ABOUT = {"kind": "hot set", "version": 1, "table_rows": {"a": 10, "b": 5}}
IDS = {"ids_0": np.array([3, 4]), "ids_1": np.array([0])}


def array(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def write(path: Path, about: Any, arrays: Mapping[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in {"about": np.array(json.dumps(about)), **arrays}.items():
            archive.writestr(f"{name}.npy", value if isinstance(value, bytes) else array(value))
    return path


def huge(count: int) -> bytes:
    """An array that says that it is large."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<i8", "fortran_order": False, "shape": (count,)}
    )
    return file.getvalue() + bytes(8)


HOT_SETS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no array": ({}, {"ids_1": IDS["ids_1"]}, "ids_0 is missing"),
    "floats": ({}, {**IDS, "ids_0": np.array([1.0])}, "must be of whole numbers"),
    "objects": ({}, {**IDS, "ids_0": np.array([{}])}, "must be of whole numbers"),
    "other numbers": ({}, {**IDS, "ids_0": np.array([1], np.int32)}, "no list of numbers"),
    "a matrix": ({}, {**IDS, "ids_0": np.array([[1]])}, "no list of numbers"),
    "out of range": ({}, {**IDS, "ids_0": np.array([10])}, "row 10 of table 'a', which has 10"),
    "negative": ({}, {**IDS, "ids_0": np.array([-1])}, "ids_0 has -1"),
    "twice": ({}, {**IDS, "ids_0": np.array([2, 2])}, "has a row of table 'a' twice"),
    "huge": ({}, {**IDS, "ids_0": huge(1 << 50)}, "has another number of bytes"),
    "no npy": ({}, {**IDS, "ids_0": b"x"}, "is no hot set"),
    "no rows": ({"table_rows": [1]}, IDS, r"table_rows is \[1\]"),
    "bad rows": ({"table_rows": {"a": -1}}, IDS, "table_rows is -1"),
    "another kind": ({"kind": "x"}, IDS, "is no hot set, but a x"),
    "another version": ({"version": 2}, IDS, "has version 2"),
}


@pytest.mark.parametrize("kind", HOT_SETS)
def test_hot_sets_are_checked(tmp_path: Path, kind: str) -> None:
    about, arrays, problem = HOT_SETS[kind]
    path = write(tmp_path / "hot.npz", {**ABOUT, **about}, arrays)
    with pytest.raises(ValueError, match=problem) as caught:
        HotSet.load(path)
    assert str(path) in str(caught.value)


def test_a_good_hot_set(tmp_path: Path) -> None:
    assert HotSet.load(write(tmp_path / "hot.npz", ABOUT, IDS)).rows == 3


def test_archives_do_not_unpack_without_end(tmp_path: Path) -> None:
    path = write(tmp_path / "hot.npz", ABOUT, IDS)
    content = bytearray(path.read_bytes())
    size = content.rindex(b"PK\1\2") + 24  # of the last array, in the directory
    content[size : size + 4] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="bytes, may have 1073741824"):
        HotSet.load(path)


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"accesses": {"a": 1}}, "accesses are not those of its tables"),
        ({"accesses": 3}, "accesses is 3"),
        ({"samples": "x"}, "samples is 'x'"),
        ({"error": -1}, "error is -1"),
        ({"counters": None}, "counters is None"),
    ],
)
def test_profiles_are_checked(tmp_path: Path, about: dict[str, Any], problem: str) -> None:
    good = {**ABOUT, "kind": "access profile", "samples": 3, "error": 0, "counters": 9}
    good["accesses"] = {"a": 4, "b": 1}
    arrays = {**IDS, "counts_0": np.array([2, 2]), "counts_1": np.array([1])}
    path = write(tmp_path / "p.npz", good, arrays)
    assert AccessProfile.load(path).samples == 3
    with pytest.raises(ValueError, match=problem):
        AccessProfile.load(write(path, {**good, **about}, arrays))
    with pytest.raises(ValueError, match="counts_0 has 1 numbers"):
        AccessProfile.load(write(path, good, {**arrays, "counts_0": np.array([2])}))


@pytest.mark.parametrize(
    "content",
    [b"", b"x", array(np.array([{}])), array(np.zeros(3)), array(np.zeros((2, 2), np.uint32))],
)
def test_vocabularies_are_checked(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"v\.npy is damaged"):
        read_vocabulary(path)


def test_longer_vocabularies_than_their_files(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(array(np.arange(9, dtype=np.uint32))[:-4])
    with pytest.raises(ValueError, match=r"v\.npy is damaged"):
        read_vocabulary(path)
    path.write_bytes(array(np.arange(9, dtype=np.uint32)))
    assert read_vocabulary(path).tolist() == list(range(9))


GOOD: dict[str, Any] = {
    "identity": {"version": 1, "sources": []},
    "dense": ["d"],
    "tables": {"a": 3},
    "parts": [{"file": "part.parquet", "samples": 2}],
    "samples": 2,
    "clicks": 1,
    "bad_lines": {"counts": {}, "examples": []},
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"parts": [{"file": "../x", "samples": 2}]},
            r"names '\.\./x', which is no file in its folder",
        ),
        ({"parts": [{"file": "/etc/passwd", "samples": 2}]}, "which is no file in its folder"),
        ({"parts": [{}]}, r"parts\.0\.file is missing.*the file is damaged"),
        ({"parts": 3}, "parts is 3.*the file is damaged"),
        ({"tables": {"a": "x"}}, r"tables\.a is 'x'.*the file is damaged"),
        ({"samples": None}, "samples is None.*the file is damaged"),
        ({"dense": [1]}, r"dense\.0 is 1.*the file is damaged"),
        ({"bad_lines": {}}, r"bad_lines\.counts is missing.*the file is damaged"),
        ({"identity": 3}, "is damaged"),
    ],
)
def test_prepared_data_is_checked(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(ValueError, match=f"(?s){problem}"):
        PreparedData.open(tmp_path)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(GOOD))
    (tmp_path / "part.parquet").write_text("x")
    with pytest.raises(ValueError, match=r"part\.parquet is damaged"):
        PreparedData.open(tmp_path).read(0, 2)
