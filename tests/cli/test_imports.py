"""What the command need not import to answer: no torch for a help text or a wrong setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusedrec_torchrec.cli.commands import COMMANDS
from tests.cli.command import ROOT
from tests.watch.runs import whole_run

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "matplotlib", "plotly", "pyarrow")
# Runs command lines one after another in one process, which has imported nothing else before.
SCRIPT = """
import contextlib, io, json, sys
from fusedrec_torchrec.cli.main import main
answers = []
for arguments in json.loads(sys.argv[1]):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as stopped:
            code = stopped.code
    answers.append([code, output.getvalue() + errors.getvalue()])
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps({"answers": answers, "heavy": heavy}))
"""


def answered(
    commands: list[list[str]], folder: Path, heavy: tuple[str, ...] = HEAVY
) -> list[tuple[int, str]]:
    """Exit codes and texts, after a check that nothing heavy was imported for them."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands), json.dumps(heavy)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["heavy"] == []
    return [(code, text) for code, text in result["answers"]]


def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    commands = [["--help"], *([name, "--help"] for name in COMMANDS)]
    commands += [["checkpoint", action, "--help"] for action in ("inspect", "verify", "convert")]
    answers = answered(commands, tmp_path)
    assert all(code == 0 and text.startswith("usage: fusedrec") for code, text in answers)
    assert all(f"\n    {name}" in answers[0][1] for name in COMMANDS)


def test_the_list_of_commands_imports_none_of_them(tmp_path: Path) -> None:
    """So it is there at once, whatever commands need."""
    unneeded = (*HEAVY, "pydantic", "yaml", "numpy", "rich")
    ((code, text),) = answered([["--help"]], tmp_path, unneeded)
    assert code == 0 and all(f"\n    {name}" in text for name in COMMANDS)
    others = ("fusedrec_torchrec.cli.train", "fusedrec_torchrec.cli.bench", *HEAVY)
    answered([["--help"], ["version"]], tmp_path, others)


def test_completion_and_watching_need_no_torch(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    commands = [["completion", shell] for shell in ("bash", "zsh", "fish")]
    commands += [["watch", str(run), "--once"], ["watch", str(run), "--json"]]
    assert all(code == 0 and text for code, text in answered(commands, tmp_path))


TINY, PLAN = str(ROOT / "configs" / "tiny.yaml"), str(ROOT / "configs" / "planner" / "tiny.yaml")
QUICK = str(ROOT / "benchmarks" / "quick.yaml")
MISTAKES = [
    ([], "usage: fusedrec"),
    (["fly"], "invalid choice: 'fly'"),
    (["train"], "the following arguments are required: --config"),
    (["train", "--config", "no.yaml"], "configuration file no.yaml does not exist"),
    (["train", "--config", TINY, "--set", "modle.x=1"], "did you mean 'model'?"),
    (["train", "--config", TINY, "--set", "launch.ranks=0"], "launch.ranks is 0"),
    (["train", "--config", TINY, "--set", "sharding.exchange.input_dist=x"], "input_dist is 'x'"),
    (["train", "--config", TINY, "--set", "sharding.hot.sync_every=0"], "sync_every is 0"),
    (["plan"], "--config is missing"),
    (["plan", "schema"], "$schema"),
    (["plan", "--config", "no.yaml"], "configuration file no.yaml does not exist"),
    (["plan", "--config", PLAN, "--set", "serch.x=1"], "did you mean 'search'?"),
    (["plan", "--config", PLAN, "--set", "cluster=no.yaml"], "no.yaml does not exist"),
    (["plan", "--config", PLAN, "--ranks", "3"], "must be a multiple of 3 ranks"),
    (["plan", "--config", PLAN, "--set", "profile=no.npz"], "no.npz does not exist"),
    (["plan", "--config", PLAN, "--set", f"profile={TINY}"], "tiny.yaml is no access profile"),
    (["plan", "diff", "a.yaml", "b.yaml"], "configuration file a.yaml does not exist"),
    (["plan", "diff", TINY, TINY], "tiny.yaml is no plan file"),
    (["simulate", "--config", PLAN, "--set", "profile=no.npz"], "no.npz does not exist"),
    (["simulate", "--config", PLAN, "--ranks", "8,4"], "--ranks is '8,4', must be ascending"),
    (["simulate", "--config", PLAN, "--set", "serch.x=1"], "did you mean 'search'?"),
    (["bench", "no.yaml"], "configuration file no.yaml does not exist"),
    (["bench", "--set", "pairs=1"], "pairs is 1"),
    (["bench", "--only", "nothing"], "no workload's name contains 'nothing'"),
    (["bench", "."], ". holds no results of a benchmark"),
    (["bench", QUICK, "--data", "no.txt"], "data file no.txt does not exist"),
    (["bench", QUICK, "--validate-planner", "--data", "no.txt"], "no.txt does not exist"),
    (["calibrate", "--ranks", "1"], "--ranks is 1, must be at least 2"),
    (["calibrate", "--rates-of", "no.yaml"], "configuration file no.yaml does not exist"),
    (["checkpoint", "inspect", "no"], "no does not exist"),
    (["checkpoint", "inspect", "."], ". is no checkpoint"),
    (["checkpoint", "verify", "."], ". is no checkpoint"),
    (["checkpoint", "convert", ".", "to"], ". is no checkpoint"),
    (["checkpoint", "export", ".", "--output", "to"], ". is no checkpoint"),
    (["checkpoint", "verify", TINY], "tiny.yaml is no checkpoint"),
    (["checkpoint", "convert", ".", "to", "--plan", TINY], "tiny.yaml is no plan file"),
    (["checkpoint", "convert", ".", "to", "--table", "x"], "--table is 'x', must be NAME=SHARDING"),
    (["profile", "no.yaml"], "configuration file no.yaml does not exist"),
    (["profile", TINY, "--save", "x.npz", "--hot-rows", "0"], "--hot-rows is 0, must be at least"),
    (["watch", "no"], "no does not exist; it must be the folder of a run"),
    (["inspect", "no"], "no does not exist"),
    (["inspect", "no.npz"], "no.npz does not exist"),
    (["inspect", TINY], "tiny.yaml is no plan file"),
    (["inspect", "."], ". holds nothing that inspect knows"),
]


def test_mistakes_are_answered_without_anything_heavy(tmp_path: Path) -> None:
    answers = answered([arguments for arguments, _ in MISTAKES], tmp_path)
    for (arguments, problem), (code, text) in zip(MISTAKES, answers, strict=True):
        assert code == (0 if arguments == ["plan", "schema"] else 2), (arguments, text)
        assert problem in text, arguments


HOT = ["--set", "sharding.hot.tables.country.ids=[999999999]"]
OF_DATA = [
    (["train", "--config", TINY, "--set", "launch.ranks=3"], "must be a multiple of the number of"),
    (["train", "--config", TINY, "--set", "sharding.tables.movie=row_wise"], "names 'movie'"),
    (["train", "--config", TINY, "--set", "data.synthetic.samples=100"], "do not fill one batch"),
    (["train", "--config", TINY, "--set", "plan=no.yaml"], "no.yaml does not exist"),
    (["train", "--config", TINY, "--set", f"plan={TINY}"], "tiny.yaml is no plan file"),
    (["train", "--config", TINY, "--set", "sharding.hot.hot_set=no.npz"], "no.npz does not exist"),
    (["train", "--config", TINY, *HOT], "id 999999999 is out of range [0, "),
    (
        ["train", "--config", TINY, *HOT, "--set", "sharding.tables.country=table_wise"],
        "names 'country', whose sharding is table_wise, must be fused_row_wise",
    ),
    (
        ["train", "--config", TINY, "--set", "sharding.hot.rule.cost_model=true"],
        "cost_model needs hot.profile",
    ),
    (["prepare", "no.tsv", "--output", "out"], "data file no.tsv does not exist"),
    (["prepare", "no.csv", "--infer", "x.yaml"], "data file no.csv does not exist"),
    (["prepare", "--config", TINY], "is synthetic, must be table or criteo"),
    (["profile", "no.tsv"], "data file no.tsv does not exist"),
    (["separate", "no", "--hot-set", "no.npz", "--output", "out"], "no.npz does not exist"),
]


def test_mistakes_about_data_are_answered_without_torch(tmp_path: Path) -> None:
    settings = ["--set", f"logging.directory={tmp_path / 'run'}"]
    commands = [[*words, *(settings if words[0] == "train" else [])] for words, _ in OF_DATA]
    answers = answered(commands, tmp_path, ("torch", "torchrec", "fbgemm_gpu", "matplotlib"))
    for (arguments, problem), (code, text) in zip(OF_DATA, answers, strict=True):
        assert code == 2 and problem in text, (arguments, text)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    train = ["train", "--config", TINY, "--set", f"logging.directory={tmp_path / 'run'}"]
    (code, text), (again, resumed) = answered([train, [*train, "--resume"]], tmp_path, HEAVY[:3])
    assert code == again == 2
    assert "holds a run already: use --resume" in text and "nothing to resume" in resumed


@pytest.mark.parametrize(
    ("module", "command"),
    [("pydantic", ["train", "--config", TINY]), ("torch", ["version", "--verbose"])],
)
def test_a_missing_package_is_named(module: str, command: list[str], tmp_path: Path) -> None:
    """Also where it is imported when the work begins only."""
    (tmp_path / "without.py").write_text(
        f"import sys\nsys.modules[{module!r}] = None\n"
        "from fusedrec_torchrec.cli.main import main\nmain(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "without.py", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    problem = f"fusedrec needs {module}, which is not installed: docs/install.md says how (pip"
    assert problem in done.stderr
