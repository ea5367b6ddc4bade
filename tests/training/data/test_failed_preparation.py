"""A preparation that failed or was killed does not stand in the way of the next one."""

import subprocess
from pathlib import Path

import pytest

from fusedrec_torchrec.training.data import lines as lines_module
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData
from tests.cli.command import python
from tests.training.data.criteo_text import lines, write
from tests.training.data.test_prepare import contents

SMALL = PrepareOptions(part_rows=100, group_rows=64)
SMALL_BLOCKS = 16_384

# Runs `fusedrec prepare` with small files, and what the first argument says before and within.
CHILD = """
import functools, os, resource, signal, sys
from pathlib import Path
from fusedrec_torchrec.cli import prepare as command
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.training.data import lines

lines.BLOCK_BYTES = 16_384
command.PrepareOptions = functools.partial(command.PrepareOptions, part_rows=100, group_rows=64)
kind, number, *arguments = sys.argv[1:]
if kind == "limit":  # no file may be larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), int(number)))
else:  # dies before so many files have their names
    replace, written = Path.replace, []

    def replaced(self, target):
        written.append(target)
        if len(written) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = replaced
sys.exit(main(["prepare", *arguments]))
"""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", SMALL_BLOCKS)


def in_child(kind: str, number: int, path: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return python("-c", CHILD, kind, number, path, "--output", output, "--quiet")


def check_same(data: PreparedData, path: Path, folder: Path, options: PrepareOptions) -> None:
    """It is what one that never failed would have written, and nothing else is there."""
    straight = prepare([path], folder, options, progress=False)
    assert data.manifest == straight.manifest
    for ours, theirs in zip(contents(data), contents(straight), strict=True):
        assert (ours == theirs).all()
    names, wanted = (
        sorted(str(file.relative_to(root)) for file in root.rglob("*"))
        for root in (data.folder, folder)
    )
    assert names == wanted


@pytest.mark.parametrize("where", [0, 450])
def test_text_that_was_mended_is_prepared_into_the_same_folder(
    tmp_path: Path, where: int, capsys: pytest.CaptureFixture[str]
) -> None:
    content, out = lines(600), tmp_path / "out"
    bad = [*content[:where], "bad", *content[where:]]
    path = write(tmp_path / "a", bad)
    with pytest.raises(ValueError, match=rf"a:{where + 1}: 1 column"):
        prepare([path], out, SMALL, progress=False)
    assert bool(list(out.glob("work/raw-*"))) == bool(where)  # it had got somewhere
    size = path.stat().st_size
    write(path, content)
    data = prepare([path], out, SMALL, progress=False)
    assert capsys.readouterr().err == (
        f"{out} holds an unfinished preparation, which is begun anew: from a ({size} bytes), now a "
        f"({path.stat().st_size} bytes)\n"
    )
    check_same(data, path, tmp_path / "straight", SMALL)


@pytest.mark.parametrize("stop_at", [4, 20, 39])
def test_other_options_begin_anew_in_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Stops while columns, vocabularies or rows are written."""
    path, out = write(tmp_path / "a", lines(600)), tmp_path / "out"
    written, replace = 0, Path.replace

    def stopping(self: Path, target: Path) -> Path:
        nonlocal written
        written += 1
        if written == stop_at:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare([path], out, SMALL, progress=False)
    monkeypatch.setattr(Path, "replace", replace)
    other = PrepareOptions(part_rows=200, group_rows=64, min_count=3)
    data = prepare([path], out, other, progress=False)
    check_same(data, path, tmp_path / "straight", other)


def test_one_that_was_killed_goes_on(tmp_path: Path) -> None:
    path, out = write(tmp_path / "a", lines(600)), tmp_path / "out"
    assert in_child("kill", 4, path, out).returncode == -9
    assert list(out.glob("work/raw-*"))
    data = prepare([path], out, SMALL, progress=False)
    check_same(data, path, tmp_path / "straight", SMALL)


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_half_written(
    tmp_path: Path,
) -> None:
    """A limit on the size of files ends a write in its middle, as a full disk does."""
    path, out = write(tmp_path / "a", lines(600)), tmp_path / "out"
    raw = out / "work" / "raw-00000.parquet"
    done = in_child("limit", 4096, path, out)
    assert done.returncode == 2
    assert done.stderr == f"fusedrec prepare: {raw}: File too large\n"
    assert not list(out.rglob("*.partial"))
    data = prepare([path], out, SMALL, progress=False)
    check_same(data, path, tmp_path / "straight", SMALL)
