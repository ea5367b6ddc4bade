"""``fusedrec profile`` writes profiles and hot sets, ``fusedrec separate`` sorts by them."""

import json
from pathlib import Path

import pytest

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepared import PreparedData
from tests.training.data.criteo_text import lines, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    text = write(folder / "train.tsv", lines(3000, values=15))
    prepare([text], folder / "prepared", progress=False)
    return folder / "prepared"


def test_profile_hot_set_and_separated_data(
    prepared: Path, tmp_path: Path, capsys: Capture
) -> None:
    files = {name: str(tmp_path / name) for name in ("p.npz", "h.npz", "c.png")}
    arguments = ["--share", "0.5", "--hot-rows", "250", "--batch-size", "500", "--quiet"]
    arguments += ["--plot", files["c.png"]]
    arguments += ["--save", files["p.npz"], "--hot-set", files["h.npz"]]
    assert main(["profile", str(prepared), *arguments]) == 0
    shown = capsys.readouterr().out
    assert main(["profile", str(prepared), *arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["hot_set"]
    profile, hot_set = AccessProfile.load(Path(files["p.npz"])), HotSet.load(Path(files["h.npz"]))
    assert f"hot set, picked by {profile.samples} samples" in shown
    assert profile.samples == figures["samples"] == 6 * 256
    assert hot_set.rows == figures["rows"] == 250
    assert figures["bytes"] == 250 * (64 * 4 + 4)
    data = PreparedData.open(prepared)
    hot = hot_set.hot_samples(data.read(0, 3000)).mean()
    assert figures["hot_samples"] == pytest.approx(hot) and 0 < hot < 1
    assert figures["coverage"] <= figures["best_coverage"] < 1
    assert Path(files["c.png"]).read_bytes().startswith(b"\x89PNG")

    output = tmp_path / "separated"
    command = ["separate", str(prepared), "--hot-set", files["h.npz"], "--output", str(output)]
    assert main([*command, "--quiet", "--held-out", "0.2"]) == 0
    sorted_data = PreparedData.open(output)
    assert sorted_data.hot_samples is not None
    assert f"the first {sorted_data.hot_samples[0]} need hot rows only" in capsys.readouterr().out
    assert main([*command, "--quiet"]) == 2
    assert "is not empty, must be a new folder" in capsys.readouterr().err


def test_a_sample_alone_and_merged(prepared: Path, tmp_path: Path, capsys: Capture) -> None:
    first, second = str(tmp_path / "1.npz"), str(tmp_path / "2.npz")
    assert main(["profile", str(prepared), "--save", first, "--sample-only", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "accesses to 26 tables" not in shown and "in truth" not in shown
    arguments = ["--share", "1", "--merge", first, "--sample-only", "--quiet"]
    assert main(["profile", str(prepared), "--save", second, *arguments]) == 0
    once, merged = AccessProfile.load(Path(first)), AccessProfile.load(Path(second))
    assert merged.samples == once.samples + 3000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hot-rows", "0"], "--hot-rows is 0, must be at least 1"),
        (["--memory", "0.0001"], "must be at least 260 bytes"),
        (["--memory", "0", "--optimizer", "adagrad"], "must be at least 512 bytes"),
        (["--memory", "0", "--optimizer", "sgd"], "must be at least 256 bytes"),
        (
            ["--memory", "0", "--optimizer", "momentum_scaled_rowwise_adagrad"],
            "must be at least 260 bytes",
        ),
        (["--share", "2"], "share of samples is 2.0, must be in (0, 1]"),
        (["--counters", "0"], "counters is 0, must be at least 1"),
        (["--merge", "/nowhere.npz"], "access profile /nowhere.npz does not exist"),
    ],
)
def test_wrong_settings_are_exit_code_2(
    prepared: Path, tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    hot_set = ["--hot-set", str(tmp_path / "h.npz")]
    assert main(["profile", str(prepared), *hot_set, "--quiet", *arguments]) == 2
    assert message in capsys.readouterr().err
