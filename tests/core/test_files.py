"""Files that cannot be written: the error names them, and nothing half written stays."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fusedrec_torchrec.access.array_file import write_arrays
from fusedrec_torchrec.core.files import described, naming, write_json, write_text
from fusedrec_torchrec.training.data.parquet import write_parquet


@contextmanager
def little_room() -> Iterator[None]:
    """No file may have more than 4096 bytes, as if the disk were full.

    Not a fixture: pytest itself may write its report to a file while one is in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_writer_names_its_file(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 60, 10_000)
    writers = {
        "a.json": lambda path: write_json(path, {"numbers": numbers.tolist()}),
        "a.parquet": lambda path: write_parquet(path, pa.table({"a": numbers}), 100),
        "a.npz": lambda path: write_arrays(path, "hot set", {}, {"a": numbers}),
    }
    for name, write in writers.items():
        with pytest.raises(OSError, match=name) as caught, little_room():
            write(tmp_path / name)
        assert described(caught.value).startswith(f"{tmp_path / name}: ")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=r"a\.html") as caught, little_room():
        write_text(tmp_path / "a.html", "x" * 10_000)
    assert described(caught.value) == f"{tmp_path / 'a.html'}: File too large"


def test_a_file_that_was_there_stays_as_it_was(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_errors_are_named_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing, naming(Path("other")):
        (tmp_path / "no").read_text()
    assert described(missing.value) == f"{tmp_path / 'no'}: No such file or directory"
    with pytest.raises(OSError, match="a: only words") as unnumbered, naming(Path("a")):
        raise OSError("only words")
    assert described(unnumbered.value) == "a: only words"
