"""Code blocks of README and docs run; figures and generated pages are up to date.

``python`` blocks of a document run one after another in one process, as the only rank of a group;
those that shard a model by a plan also on two ranks.
The README's program runs as a reader would start it: by itself, and under torchrun.  ``yaml``
blocks load as training configurations.  ``sh`` blocks run line by line in a folder with the
configurations, a ``train.txt`` and a ``clicks.csv``; lines whose program needs the network, a
cluster or other machines (see ``NOT_HERE``) are only checked to be well-formed, as are benchmarks,
``make`` goals to exist.  ``text`` blocks are output.
"""

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from fusedrec_torchrec.bench.suite import SuiteConfig
from fusedrec_torchrec.cli.main import main, parser_of
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.training.config import LaunchConfig, TrainConfig
from tests.cli.command import ROOT, python, torchrun
from tests.training.data.criteo_text import lines, write

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_HERE = ("pip", "torchrun", "sbatch", "kubectl")
RUN_ALWAYS = ("README.md", "first_run.md")  # the commands of others in ``make test-all``
ON_TWO_RANKS = ("your_model.md", "speed_up.md", "checkpoints.md")  # in ``make test-all``
LANGUAGES = {"python", "yaml", "sh", "text"}
AIMED_AT = r"\btargets? (is|for)\b|It is met|has not been reached"
FILL_PAGES = (
    "import sys; sys.path.insert(0, 'docs'); import performance\n"
    "for page in performance.PAGES:\n"
    "    print(page.name, performance.fill(page.read_text()) == page.read_text())"
)
FILL_PAPERS = (
    "import sys; sys.path.insert(0, 'benchmarks'); import papers\n"
    "print(papers.filled(papers.PAGE.read_text()), end='')"
)


def blocks(document: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    assert {name for name, _ in found} <= LANGUAGES, f"{document.name}: unknown kind of block"
    return [text for name, text in found if name == language]


def having(language: str) -> list[Path]:
    return [document for document in DOCUMENTS if blocks(document, language)]


def test_the_documents_have_code() -> None:
    assert {path.name for path in having("python")} >= {"README.md", "data.md"}
    assert {path.name for path in having("sh")} >= {"first_run.md", "training.md", "data.md"}
    assert {path.name for path in having("yaml")} >= {"first_run.md", "data.md"}


@pytest.mark.parametrize(
    "document",
    [document for document in having("python") if document.name != "README.md"],
    ids=lambda path: path.name,
)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    group = {**store, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    script = python_blocks(document, tmp_path)
    done = python(script, cwd=tmp_path, environment=group)  # some write files
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_python_blocks_run_on_two_ranks(name: str, tmp_path: Path) -> None:
    script = python_blocks(ROOT / "docs" / name, tmp_path)
    done = torchrun("--standalone", "--nproc-per-node", 2, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def python_blocks(document: Path, folder: Path) -> Path:
    """Writes all Python of a document into one script."""
    script = folder / "blocks.py"
    script.write_text("\n".join(blocks(document, "python")))
    return script


def test_the_program_of_the_readme_takes_training_steps(tmp_path: Path) -> None:
    """Pasted into a file: as the only rank, without a word in the environment, and as two ranks."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    (program,) = blocks(ROOT / "README.md", "python")
    script = tmp_path / "first_step.py"
    script.write_text(program)
    alone = python(script, cwd=tmp_path)
    together = torchrun("--standalone", "--nproc-per-node", 2, script, cwd=tmp_path)
    for done, ranks in ((alone, 1), (together, 2)):
        assert done.returncode == 0, done.stderr
        for rank in range(ranks):
            losses = re.findall(rf"rank {rank}, step \d: loss (\d\.\d+)", done.stdout)
            assert len(losses) == 5 and sorted(losses, reverse=True) == losses, done.stdout


@pytest.mark.parametrize("document", having("yaml"), ids=lambda path: path.name)
def test_yaml_blocks_are_configurations(document: Path) -> None:
    for text in blocks(document, "yaml"):
        from_mapping(TrainConfig, yaml.safe_load(text), document.name)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader of the documents would type the commands."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("configs", "examples", "Makefile", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    write(folder / "train.txt", lines(70_000, values=500))
    clicks = [f"{i % 3 // 2},{i % 97},{i % 41},{i % 7 / 2},{i}" for i in range(30_000)]
    (folder / "clicks.csv").write_text("\n".join(["clicked,user,item,price,row", *clicks]) + "\n")
    return folder


def commands(document: Path) -> list[str]:
    return [line for text in blocks(document, "sh") for line in text.splitlines()]


ALL_COMMANDS = [command for document in DOCUMENTS for command in commands(document)]


@pytest.mark.parametrize("command", [c for c in ALL_COMMANDS if c.startswith("fusedrec ")])
def test_commands_exist(command: str) -> None:
    """Options are read, too; commands of ``RUN_ALWAYS`` run below, others in ``make test-all``."""
    parser_of().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, marks=[] if document.name in RUN_ALWAYS else [pytest.mark.slow])
        for document in having("sh")
    ],
    ids=lambda path: path.name,
)
def test_commands_run(document: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, since some work with what others before them have written."""
    for command in commands(document):
        run_command(document.name, command, workplace, capsys)


def run_command(
    name: str, command: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    while re.match("[A-Z_]+=", words[0]):  # environment variables
        del words[0]
    if words[:2] == ["fusedrec", "bench"]:  # too long a run; tests/bench has short ones
        suite = parser_of().parse_args(words[1:]).suite
        assert from_mapping(SuiteConfig, load_yaml(ROOT / suite)).expanded(), command
        return
    if words[:2] == ["fusedrec", "calibrate"]:  # minutes; tests/planner has a short one
        assert parser_of().parse_args(words[1:]).ranks >= 2, command
        return
    if words[0] in NOT_HERE:
        named = [
            word for word in words if re.match(r"(configs|examples|requirements)[-/\w]*\.", word)
        ]
        assert named or words[0] == "pip", command
        assert all((ROOT / word).is_file() for word in named), command
        return
    if words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    assert words[0] == "fusedrec", f"{name}: do not know how to run {command!r}"
    if any(word.startswith("launch.rendezvous=") for word in words):
        launched: list[LaunchConfig] = []
        with pytest.MonkeyPatch.context() as patch:  # other machines would be needed from here on
            patch.setattr(
                "fusedrec_torchrec.training.launch.launch", lambda c, _: launched.append(c)
            )
            assert main(words[1:]) == 0
        assert [launch.rendezvous for launch in launched] == ["first-machine:29500"]
        return
    if words[1] != "train":  # which starts processes; others do not need one of their own
        with contextlib.chdir(workplace):
            assert main(words[1:]) == 0, f"{command}\n{capsys.readouterr().err}"
        return
    done = python("-m", "fusedrec_torchrec.cli.main", *words[1:], cwd=workplace)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_first_run_shows_what_the_demo_prints(workplace: Path) -> None:
    """Run by the commands of training.md: the same configuration, 400 steps."""
    (shown,) = blocks(ROOT / "docs" / "first_run.md", "text")
    folder = workplace / "demo"
    arguments = ["--config", "configs/tiny.yaml", "--set", f"logging.directory={folder}"]
    done = python("-m", "fusedrec_torchrec.cli.main", "train", *arguments, cwd=workplace)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    for key, value in summary.items():
        found = re.search(rf"^  {key.replace('_', ' ')} +([\d.]+)", shown, re.MULTILINE)
        assert found, key
        if key.startswith(("eval_", "train_")):
            assert float(found.group(1)) == pytest.approx(value, abs=2e-3), key
        elif key.endswith("_per_step") and "bytes" not in key:
            assert float(found.group(1)) == value, key


def test_figures_and_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    figures = ("data_path", "parts")
    scripts = [(f"figures/{figure}.py", f"{figure}.svg") for figure in figures]
    for script, target in (*scripts, ("configuration.py", "c.md")):
        done = python(ROOT / "docs" / script, tmp_path / target)
        assert done.returncode == 0, done.stderr
    for figure in figures:
        drawn = (tmp_path / f"{figure}.svg").read_text()
        committed = (ROOT / "docs" / "figures" / f"{figure}.svg").read_text()
        # Another matplotlib may draw the letters a little differently.
        assert re.findall("<!-- (.*) -->", drawn) == re.findall("<!-- (.*) -->", committed)
        assert drawn.count("<use") == committed.count("<use")  # dots of imports, letters
    assert (tmp_path / "c.md").read_text() == (ROOT / "docs" / "configuration.md").read_text()


def links(document: Path) -> list[tuple[Path, str]]:
    """The files that a document leads to, and the anchors in them (empty if none)."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", document.read_text())
    local = [(link, anchor) for link, anchor in found if not link.startswith("http")]
    return [((document.parent / link) if link else document, anchor) for link, anchor in local]


def anchors(document: Path) -> set[str]:
    """What links to headings of a document are called, on the site as on GitHub."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"\s", "-", title) for title in words}


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "examples" / "README.md"], ids=lambda path: path.name
)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in links(document):
        assert target.exists(), f"{document.name}: {target}"
        if anchor:
            assert anchor in anchors(target), f"{document.name}: {target}#{anchor}"


def test_another_page_links_to_every_page() -> None:
    linked = {
        target.resolve()
        for document in DOCUMENTS
        for target, _ in links(document)
        if target.resolve() != document
    }
    pages_of_docs = {page for page in DOCUMENTS if page.parent.name == "docs"}
    assert len(pages_of_docs) > 20 and pages_of_docs <= linked


def test_pages_say_what_is_and_not_what_was_aimed_at() -> None:
    for document in DOCUMENTS:
        aimed = re.search(AIMED_AT, document.read_text())
        assert not aimed, f"{document.name}: {aimed}"


def pages(entry: object) -> list[str]:
    """The files that an entry of the navigation leads to."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(inner, Iterable)
    return [page for part in inner for page in pages(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    found = pages(yaml.safe_load(text))
    assert sorted(found) == [path.name for path in sorted((ROOT / "docs").glob("*.md"))]


def test_no_results_are_missing() -> None:
    quality = (ROOT / "docs" / "quality.md").read_text()
    assert re.search(r"fused_row_wise \| 0\.7\d+ ± 0\.0\d+", quality)
    hot = (ROOT / "docs" / "hot_rows_results.md").read_text()
    assert re.search(r"\| hot batches, stream[^|]+\| 0\.7\d+ ± 0\.0\d+", hot)
    assert re.search(r"are back after \| never \| \d+ steps", hot)
    compression = (ROOT / "docs" / "compression_results.md").read_text()
    assert re.search(r"\| int8 \|[^\n]+\| 0\.7\d+ ± 0\.0\d+", compression)
    assert re.search(r"\| 0\.009 \|[^\n]+\| 0\.7\d+ ± 0\.0\d+", compression)


def test_the_tables_of_the_papers_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    done = python("-c", FILL_PAPERS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == page
    assert re.search(r"\| Criteo, batches of \d+ \| [\d,]+ \| [\d.]+%", page)


def test_figures_of_speed_are_those_of_the_measurements() -> None:
    """What stands between marks is what the committed measurements give."""
    done = python("-c", FILL_PAGES, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    up_to_date = dict(line.split() for line in done.stdout.splitlines())
    assert set(up_to_date.values()) == {"True"}, up_to_date
    results = {"performance.md", "performance_details.md", "hot_rows_results.md"}
    assert up_to_date.keys() >= {"README.md", "compression_results.md", *results}
    readme = (ROOT / "README.md").read_text()
    assert "| Criteo, loopback, 2048 |" in readme and "| MLPerf, loopback, 1024 |" in readme
    assert "| default | " in (ROOT / "docs" / "performance.md").read_text()
