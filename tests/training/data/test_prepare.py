"""Text to parquet: the right rows, resumable, in a folder of its own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.training.data import criteo, criteo_source, preparation
from fusedrec_torchrec.training.data import lines as lines_module
from fusedrec_torchrec.training.data.criteo import CATEGORIES
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData
from tests.training.data.criteo_text import line, lines, write
from tests.warm.forks import CONTEXT

SMALL = PrepareOptions(part_rows=200, group_rows=64)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 16_384)


def expected_rows(content: list[str], min_count: int) -> np.ndarray:
    """[n, 26] rows, computed one by one."""
    cells = [text.split("\t")[14:] for text in content]
    rows = np.zeros((len(content), 26), dtype=np.int64)
    for column in range(26):
        counts = Counter(row[column] for row in cells if row[column])
        kept = sorted(int(v, 16) for v, count in counts.items() if count >= min_count)
        place = {value: i + 2 for i, value in enumerate(kept)}
        for i, row in enumerate(cells):
            rows[i, column] = place.get(int(row[column], 16), 1) if row[column] else 0
    return rows


def contents(data: PreparedData) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    samples = data.read(0, data.samples)
    return samples.labels, samples.dense, samples.ids.reshape(26, -1).T


@pytest.mark.parametrize("min_count", [1, 3])
def test_rows_labels_and_dense_values(tmp_path: Path, min_count: int) -> None:
    content = lines(700)
    files = [
        write(tmp_path / "day_0.gz", content[:300]),
        write(tmp_path / "day_1", content[300:]),
    ]
    options = PrepareOptions(min_count=min_count, part_rows=200, group_rows=64)
    data = prepare(files, tmp_path / "out", options, progress=False)
    labels, dense, ids = contents(data)
    assert labels.tolist() == [int(text[0]) for text in content]
    assert (ids == expected_rows(content, min_count)).all()
    numbers = [[int(cell or 0) for cell in text.split("\t")[1:14]] for text in content]
    assert np.allclose(dense, np.log(np.array(numbers) + 3.0))
    assert all(rows > ids[:, i].max() for i, rows in enumerate(data.table_rows.values()))
    assert data.manifest["clicks"] == labels.sum()
    assert len(data.manifest["parts"]) > 1 and data.blocks.max() <= 64
    assert not (tmp_path / "out" / "work").exists()


def test_options_limit_rows_and_leave_integers_alone(tmp_path: Path) -> None:
    content = lines(300)
    options = PrepareOptions(max_rows=7, dense_transform="none")
    data = prepare([write(tmp_path / "a.tsv", content)], tmp_path / "out", options, progress=False)
    _, dense, ids = contents(data)
    assert set(data.table_rows.values()) == {7} and ids.max() == 6
    assert dense[0].tolist() == [float(cell or 0) for cell in content[0].split("\t")[1:14]]


def test_very_negative_integers_have_a_logarithm(tmp_path: Path) -> None:
    data = prepare([write(tmp_path / "a", [line(integer="-99")])], tmp_path / "out", progress=False)
    assert contents(data)[1].tolist() == [[0.0] * 13]


def test_any_source_reads_the_same_in_any_pieces(tmp_path: Path) -> None:
    data = prepare([write(tmp_path / "a", lines(500))], tmp_path / "out", SMALL, progress=False)
    whole = data.read(0, 500)
    for start, stop in ((0, 1), (63, 65), (10, 499), (128, 192), (499, 500)):
        part = data.read(start, stop)
        assert (part.dense == whole.dense[start:stop]).all()
        assert part.labels.tolist() == whole.labels[start:stop].tolist()
        assert (part.ids.reshape(26, -1) == whole.ids.reshape(26, -1)[:, start:stop]).all()


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop_at", range(1, 40, 3))
def test_a_stopped_preparation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Stops before the n-th file is written, then runs again."""
    content = lines(600)
    content[250] = "bad"
    files = [write(tmp_path / "a.gz", content[:310]), write(tmp_path / "b", content[310:])]
    options = PrepareOptions(part_rows=100, group_rows=64, on_bad_line="skip")
    straight = prepare(files, tmp_path / "straight", options, progress=False)

    written = 0
    replace = Path.replace

    def stopping(self: Path, target: Any) -> Path:
        nonlocal written
        written += 1
        if written == stop_at:
            raise StoppedError
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stopping)
    with pytest.raises(StoppedError):
        prepare(files, tmp_path / "out", options, progress=False)
    with pytest.raises(ValueError, match="holds no prepared data"):
        PreparedData.open(tmp_path / "out")
    parsed = 0
    read = criteo.read

    def counting(*args: Any) -> Any:
        nonlocal parsed
        for columns, block in read(*args):
            parsed += len(columns)
            yield columns, block

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(criteo_source, "read", counting)
    resumed = prepare(files, tmp_path / "out", options, progress=False)
    for ours, theirs in zip(contents(resumed), contents(straight), strict=True):
        assert (ours == theirs).all()
    assert resumed.manifest == straight.manifest
    assert resumed.manifest["bad_lines"]["counts"] == {"wrong number of columns": 1}
    assert parsed < 599 or stop_at <= 3  # text that was read is not parsed again


def test_an_unfinished_preparation_goes_on_or_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a", [*lines(100), "bad"])
    skip = PrepareOptions(on_bad_line="skip")

    def stopped(*_: Any) -> int:
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "build_vocabulary", stopped)
        with pytest.raises(StoppedError):
            prepare([path], tmp_path / "out", skip, progress=False)
    with pytest.raises(ValueError, match=r"a:101: .*out was made with on_bad_line='skip', which"):
        prepare([path], tmp_path / "out", PrepareOptions(), progress=False)
    assert capsys.readouterr().err == ""
    other = PrepareOptions(on_bad_line="skip", min_count=2)
    assert prepare([path], tmp_path / "out", other, progress=False).samples == 100
    assert capsys.readouterr().err == (
        f"{tmp_path / 'out'} holds an unfinished preparation, which is begun anew: min_count=1, "
        "now min_count=2\n"
    )


def test_preparing_again_returns_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", lines(100))
    first = prepare([path], tmp_path / "out", SMALL, progress=False)
    monkeypatch.setattr(criteo_source, "read", None)
    assert prepare([path], tmp_path / "out", SMALL, progress=False).manifest == first.manifest


def test_other_files_options_or_contents_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lines(100))
    size = path.stat().st_size
    prepare([path], tmp_path / "out", SMALL, progress=False)
    for changed, difference in (
        ({"min_count": 2}, "min_count=1, now min_count=2"),
        ({"max_rows": 9}, "max_rows=None, now max_rows=9"),
        ({"dense_transform": "none"}, "dense_transform='log', now dense_transform='none'"),
    ):
        options = PrepareOptions(part_rows=200, group_rows=64, **changed)
        with pytest.raises(ValueError, match="holds data that was prepared otherwise") as caught:
            prepare([path], tmp_path / "out", options, progress=False)
        assert f"otherwise: {difference}. Choose another folder, or remove" in str(caught.value)
    other = write(tmp_path / "b", lines(90))
    difference = rf"from a \({size} bytes\), now b \({other.stat().st_size} bytes\)\. Choose"
    with pytest.raises(ValueError, match=difference):
        prepare([other], tmp_path / "out", SMALL, progress=False)
    write(path, lines(100)[::-1])  # another text of the same size
    with pytest.raises(ValueError, match=r"a \(\d+ bytes\): the text has changed since then"):
        prepare([path], tmp_path / "out", SMALL, progress=False)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ValueError, match=r"is not empty \(it holds 'cat.jpg'\)"):
        prepare([path], tmp_path / "photos", SMALL, progress=False)
    with pytest.raises(ValueError, match=r"cat.jpg is a file, must be a folder"):
        prepare([path], tmp_path / "photos" / "cat.jpg", SMALL, progress=False)


def test_malformed_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [line(), "bad", line()])
    with pytest.raises(ValueError, match=r"a:2: 1 column, must be 40 as in Criteo's format: label"):
        prepare([path], tmp_path / "out", progress=False)
    skip = PrepareOptions(on_bad_line="skip")
    data = prepare([path], tmp_path / "out", skip, progress=False)
    assert data.samples == 2
    assert data.manifest["bad_lines"]["examples"] == [
        f"{path}:2: 1 column, must be 40 as in Criteo's format: label, 13 integers, 26 hexadecimal "
        "categories, separated by tabs"
    ]
    only_bad = write(tmp_path / "b", ["bad"] * 3)
    with pytest.raises(ValueError, match="no usable line in"):
        prepare([only_bad], tmp_path / "out2", skip, progress=False)


def prepare_elsewhere(path: Path, output: Path) -> int:
    return prepare([path], output, SMALL, progress=False).samples


def test_several_processes_prepare_one_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lines(400))
    with CONTEXT.Pool(3) as pool:
        results = pool.starmap(prepare_elsewhere, [(path, tmp_path / "out")] * 3)
    assert results == [400] * 3


def test_damaged_prepared_data_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = prepare([write(tmp_path / "a", lines(100))], out, SMALL, progress=False)
    with pytest.raises(ValueError, match=r"holds no prepared data .* `fusedrec prepare"):
        PreparedData.open(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        PreparedData.open(out)
    manifest["identity"]["version"] = 99
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="of version 99, this release reads version 1"):
        PreparedData.open(out)
    manifest["identity"]["version"] = 1
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / data.manifest["parts"][0]["file"]).unlink()
    with pytest.raises(ValueError, match=r"part-00000.parquet is missing"):
        PreparedData.open(out)


@pytest.mark.parametrize(
    ("option", "value"),
    [("min_count", 0), ("part_rows", 0), ("group_rows", 0), ("memory_mb", 0), ("max_rows", 2)],
)
def test_options_out_of_range_are_named(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}(: it should|, must) be"):
        PrepareOptions(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["on_bad_line", "dense_transform"])
def test_choices_that_do_not_exist_are_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 'x': it should be '\\w+' or '\\w+'"):
        PrepareOptions(**{option: "x"})  # type: ignore[arg-type]


def test_memory_budget_does_not_change_the_result(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lines(400, values=5000))
    little = prepare([path], tmp_path / "x", PrepareOptions(memory_mb=1), progress=False)
    much = prepare([path], tmp_path / "y", PrepareOptions(), progress=False)
    assert little.table_rows == much.table_rows and list(little.table_rows) == CATEGORIES
