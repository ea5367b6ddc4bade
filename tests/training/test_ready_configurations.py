"""Ready configurations for public data: each trains on a few made-up lines in its format."""

import contextlib
import gzip
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.source import open_source
from tests.cli.command import ROOT, fusedrec
from tests.cluster import Cluster
from tests.training.runs import train

AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
SMALL = ("data.batch_size=32", "data.eval_batch_size=16", "data.workers=0", "steps=6")
TAOBAO = ROOT.parent / "shared" / "data" / "taobao_user_behavior_110k.csv.gz"


def avazu(folder: Path) -> Path:
    generator = random.Random(0)
    lines = [AVAZU]
    for day in range(21, 31):
        for i in range(60):
            hashed = [f"{generator.randrange(30):08x}" for _ in range(9)]
            numbers = [str(generator.randrange(5)) for _ in range(8)]
            first = [f"{10**18 + i}", str(i % 3 // 2), f"1410{day}{i % 24:02}", "1005", "0"]
            lines.append(",".join([*first, *hashed, "1", "0", *numbers]))
    path = folder / "train.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n"))
    return path


def movielens(folder: Path, first: int = 1_600_000_000, last: int = 1_660_000_000) -> Path:
    """Ratings from September 2020 to August 2022, or of other seconds."""
    generator = random.Random(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, 41):
        for _ in range(15):
            movie, rating = generator.randrange(1, 30), generator.randrange(1, 11) / 2
            when = generator.randrange(first, last)
            lines.append(f"{user},{movie},{rating},{when}")
    path = folder / "ratings.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def taobao(folder: Path) -> Path:
    generator = random.Random(0)
    lines = []
    for i in range(600):
        what = generator.choice(["pv", "pv", "pv", "buy", "cart", "fav"])
        when = 1_511_539_200 + i * 1296  # 2017-11-25 to 2017-12-03, by the clock of Beijing
        ids = (generator.randrange(40), generator.randrange(50), generator.randrange(9))
        lines.append(",".join([*map(str, ids), what, str(when)]))
    path = folder / "UserBehavior.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def small(name: str, path: Path, folder: Path) -> dict[str, Any]:
    """The configuration as it is, but for the file, the folders and the sizes of batches."""
    data = load_yaml(ROOT / "configs" / f"{name}.yaml")
    data["data"]["table"] |= {"files": [str(path)], "prepared": str(folder / "data")}
    data["data"] |= {"batch_size": 32, "eval_batch_size": 16, "workers": 0}
    logging = {"directory": str(folder / "run"), "tensorboard": False, "plots": False}
    return {**data, "steps": 6, "eval_every": 3, "checkpoint": {}, "logging": logging}


@pytest.mark.parametrize(
    ("name", "make", "held_out", "features", "dense"),
    [
        ("avazu", avazu, 60, 23, 0),
        ("movielens", movielens, None, 5, 1),
        ("taobao", taobao, 67, 4, 4),
    ],
)
def test_lines_in_the_format_of_the_public_file_train(
    cluster_1: Cluster,
    tmp_path: Path,
    name: str,
    make: Any,
    held_out: int | None,
    features: int,
    dense: int,
) -> None:
    settings = small(name, make(tmp_path), tmp_path)
    config = from_mapping(TrainConfig, settings)
    source = open_source(config)
    assert isinstance(source, PreparedData) and source.samples == 600
    assert (len(source.features), source.dense_features) == (features, dense)
    if held_out is None:
        assert source.held_out is not None and 16 <= source.held_out < 300
    else:
        assert abs((source.held_out or 0) - held_out) <= 1
    assert 0 < source.manifest["clicks"] < 600
    (done,) = cluster_1.run(train, settings)
    assert 0 < done["result"]["log_loss"] < 2


@pytest.mark.parametrize(
    ("name", "make"), [("avazu", avazu), ("movielens", movielens), ("taobao", taobao)]
)
def test_the_commands_of_a_configuration_lead_from_its_file_to_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, make: Any
) -> None:
    """With the public file where the configuration looks for it, and smaller batches."""
    path = ROOT / "configs" / f"{name}.yaml"
    (tmp_path / "configs").symlink_to(path.parent)
    where = tmp_path / load_yaml(path)["data"]["table"]["files"][0]
    where.parent.mkdir(parents=True)
    made = make(tmp_path)
    made.rename(where)
    prepare, profile, train_it = (
        line.removeprefix("#   fusedrec ").split()
        for line in path.read_text().splitlines()
        if line.startswith("#   fusedrec ")
    )
    with contextlib.chdir(tmp_path):
        for command in ([*prepare, "--quiet"], [*profile, "--batch-size", "64", "--quiet"]):
            assert main(command) == 0, capsys.readouterr().err
    assert "accesses to" in capsys.readouterr().out
    settings = [word for size in SMALL for word in ("--set", size)]
    done = fusedrec(*train_it, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"run runs/{name}\n" in done.stdout and "eval auc" in done.stdout


def test_movielens_25m_trains_with_the_settings_that_its_configuration_names(
    tmp_path: Path,
) -> None:
    """Its last ratings are of November 2019."""
    path = ROOT / "configs" / "movielens.yaml"
    (line,) = (line for line in path.read_text().splitlines() if "ml-25m" in line)
    where = tmp_path / "data" / "ml-25m" / "ratings.csv"
    where.parent.mkdir(parents=True)
    movielens(tmp_path, 1_450_000_000, 1_574_300_000).rename(where)
    settings = shlex.split(line.removeprefix("#"))
    prepared = fusedrec("prepare", "--config", path, *settings, "--quiet", cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    (held_out,) = re.findall(r"of them held out +(\d+)", prepared.stdout)
    assert 60 <= int(held_out) < 300
    for size in SMALL:
        settings += ["--set", size]
    done = fusedrec("train", "--config", path, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run runs/movielens\n" in done.stdout and "eval auc" in done.stdout


@pytest.mark.parametrize("name", ["avazu", "movielens", "taobao"])
def test_without_the_public_file_it_is_named(name: str, tmp_path: Path) -> None:
    config = from_mapping(TrainConfig, load_yaml(ROOT / "configs" / f"{name}.yaml"))
    with contextlib.chdir(tmp_path), pytest.raises(ValueError, match="does not exist") as error:
        open_source(config)
    assert config.data.table is not None
    (file,) = config.data.table.files
    assert f"data file {file} does not exist in {tmp_path}" in str(error.value)


@pytest.mark.skipif(not TAOBAO.is_file(), reason=f"needs {TAOBAO.name} in ../shared/data")
def test_the_real_log_of_taobao_is_read_and_trained_on(cluster_1: Cluster, tmp_path: Path) -> None:
    settings = small("taobao", TAOBAO, tmp_path)
    # The sample is of two hours of one day.
    settings["data"]["table"]["split"] = {"by": "random", "share": 0.1}
    source = open_source(from_mapping(TrainConfig, settings))
    assert isinstance(source, PreparedData) and source.samples == 110_300
    assert source.manifest["clicks"] == 6063 + 3383 + 2493
    assert source.held_out == pytest.approx(11_030, rel=0.05)
    assert source.table_rows["category"] <= 3913 + 2
    settings |= {"steps": 90, "eval_every": 0, "eval_batches": 4}
    settings["optimizer"]["schedule"]["warmup_steps"] = 10
    settings["data"] |= {"batch_size": 1024, "eval_batch_size": 2048}
    (done,) = cluster_1.run(train, settings)
    assert done["result"]["log_loss"] < 0.45  # 0.34 knowing but the share of clicks
