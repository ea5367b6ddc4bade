"""Prepared data that is damaged: the error names the file, and comes as early as it can."""

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.access.samples import DamagedDataError
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.training.data import lines as lines_module
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData
from tests.cli.command import ROOT
from tests.cluster import Cluster
from tests.training.data.criteo_text import lines, write
from tests.training.data.damage import VISIBLE, of_another_type, one_bit
from tests.training.runs import small, train

Capture = pytest.CaptureFixture[str]
SAMPLES = 2000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    options = PrepareOptions(part_rows=500, group_rows=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", 16_384)  # so that there are several files
        text = write(folder / "train.txt", lines(SAMPLES))
        prepare([text], folder / "data", options, progress=False)
    return folder / "data"


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.mark.parametrize("name", VISIBLE)
def test_what_the_ends_of_files_tell_is_exit_code_2_before_any_rank_starts(
    name: str, data: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, problem = VISIBLE[name]
    damage(data / "part-00001.parquet")
    launch = "fusedrec_torchrec.training.launch.launch"
    monkeypatch.setattr(launch, lambda *_: pytest.fail("launched"))
    settings = ["tables=[]", "data.source=criteo", f"data.criteo.prepared={data}"]
    settings.append(f"logging.directory={data.parent / 'run'}")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    config = str(ROOT / "configs" / "tiny.yaml")
    assert main(["train", "--config", config, *flags]) == 2
    error = capsys.readouterr().err
    assert problem in error and f"remove {data} and prepare the data anew" in error
    assert len(error.splitlines()) == 1
    for command in ("inspect", "profile"):
        assert main([command, str(data)]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_inside_a_file_is_found_by_whoever_reads_it(data: Path, workers: int) -> None:
    one_bit(data / "part-00001.parquet")
    source = PreparedData.open(data)
    part = (0, source.samples)
    options = {"batch_size": 64, "lanes": 1, "rank": 0, "world_size": 1, "chunk_batches": 1}
    loader = Loader(source, part, shuffle=False, workers=workers, **options)  # type: ignore[arg-type]
    with pytest.raises(DamagedDataError) as caught:
        list(loader.read(0, loader.batches))
    text = str(caught.value)
    assert text.startswith(f"{data / 'part-00001.parquet'} is damaged: ")
    assert text.endswith(f"; remove {data} and prepare the data anew")
    assert "Traceback" not in text


def test_values_that_are_missing_are_damage(data: Path) -> None:
    damage = of_another_type(
        "cat_3", lambda c: pa.array([None, *c.to_pylist()[1:]], type=pa.int32())
    )
    damage(data / "part-00000.parquet")
    source = PreparedData.open(data)
    with pytest.raises(DamagedDataError, match=r"part-00000\.parquet is damaged: column 'cat_3'"):
        source.read(0, 1)


def error_of_training(settings: dict[str, object]) -> str:
    try:
        train(settings)
    except ValueError as error:
        total = torch.ones(1)
        dist.all_reduce(total)  # the process group still works
        assert int(total) == dist.get_world_size()
        return str(error)
    raise AssertionError("no error")


def settings_of(data: Path, **changes: object) -> dict[str, object]:
    criteo = {"source": "criteo", "criteo": {"prepared": str(data)}}
    reading = {"batch_size": 128, "lanes": 4, "workers": 0, "shuffle": False, "chunk_batches": 1}
    return small(data.parent / "run", tables=[], data={**criteo, **reading}, **changes)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_damage_that_one_rank_meets_ends_the_run_on_all_ranks(
    cluster_2: Cluster, data: Path, policy: str
) -> None:
    """The first samples of the file are those of rank 1 in a step; rank 0 reads others."""
    one_bit(data / "part-00002.parquet")
    settings = settings_of(data, steps=12, eval_every=0, bad_batches={"policy": policy})
    texts = cluster_2.run(error_of_training, settings)
    assert texts[0] == texts[1]
    path = re.escape(str(data / "part-00002.parquet"))
    assert re.match(rf"batch of step \d+ cannot be read, rank 1: {path} is damaged: ", texts[0])


def test_damage_of_held_out_data_ends_the_run_on_all_ranks(cluster_2: Cluster, data: Path) -> None:
    last = max(data.glob("part-*.parquet"))
    one_bit(last)
    settings = settings_of(data, steps=2, eval_every=0)
    texts = cluster_2.run(error_of_training, settings)
    assert texts[0] == texts[1]
    assert "held-out batch number 1 cannot be read, rank " in texts[0] and last.name in texts[0]
