"""Completion scripts: what shells offer, and that they need nothing else to do so."""

import argparse
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedrec_torchrec.cli.command_tree import TAKES, tree_of
from fusedrec_torchrec.cli.commands import COMMANDS
from fusedrec_torchrec.cli.completion import SHELLS, script_for
from fusedrec_torchrec.cli.main import main, parser_of

Offer = Callable[..., set[str]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(script_for(shell))
    return folder


@pytest.fixture(params=SHELLS)
def offer(request: pytest.FixtureRequest, scripts: Path, tmp_path: Path) -> Offer:
    """What a shell offers for the last of some words, in a folder with a few files."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in ("runs/tiny", "configs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a.yaml", "b.yml", "c.txt", "configs/d.yaml"):
        (tmp_path / name).touch()
    ask = {"bash": ask_bash, "zsh": ask_zsh, "fish": ask_fish}[shell]
    return lambda *words: ask(scripts / shell, tmp_path, list(words))


def run(command: list[str], folder: Path) -> str:
    # Neither Python nor fusedrec is on this path.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask_bash(script: Path, folder: Path, words: list[str]) -> set[str]:
    quoted = " ".join(f"'{word}'" for word in ["fusedrec", *words])
    code = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _fusedrec\n"
    text = run(["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'], folder)
    return {line.removesuffix("/") for line in text.splitlines() if line}


def ask_fish(script: Path, folder: Path, words: list[str]) -> set[str]:
    line = " ".join(["fusedrec", *words])
    text = run(["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"], folder)
    return {line.partition("\t")[0].removesuffix("/") for line in text.splitlines()}


# A zsh in a terminal of its own; whatever completion adds is written down, and when it is done.
ZSH = r"""
zmodload zsh/zpty
cat > $FOLDER/.rc <<'RC'
autoload -Uz compinit; compinit -u -d $FOLDER/.dump
source $SCRIPT
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return; fi
  local -a hits
  builtin compadd -A hits "$@"
  print -rl -- $hits >> $FOLDER/.offers
  builtin compadd "$@"
}
_done() { touch $FOLDER/.end }
comppostfuncs=(_done)
touch $FOLDER/.ready
RC
zpty shell zsh -f -i
zpty -w shell "FOLDER=$FOLDER SCRIPT=$SCRIPT; source $FOLDER/.rc"
repeat 400; do [[ -e $FOLDER/.ready ]] && break; sleep 0.05; done
zpty -n -w shell "$LINE"$'\t'
repeat 400; do [[ -e $FOLDER/.end ]] && break; sleep 0.05; done
zpty -d shell
"""


def ask_zsh(script: Path, folder: Path, words: list[str]) -> set[str]:
    for name in (".offers", ".ready", ".end"):
        (folder / name).unlink(missing_ok=True)
    line = " ".join(["fusedrec", *words])
    variables = f"FOLDER='{folder}' SCRIPT='{script}' LINE='{line}'"
    run(["zsh", "-f", "-c", f"{variables}\n{ZSH}"], folder)
    offers = folder / ".offers"
    return set(offers.read_text().split("\n")) - {""} if offers.exists() else set()


def test_commands_and_actions_are_offered(offer: Offer) -> None:
    assert offer("") >= set(COMMANDS)
    assert offer("ch") == {"checkpoint"}
    assert offer("checkpoint", "") >= {"inspect", "verify", "convert", "export"}
    assert offer("completion", "") >= set(SHELLS)


def test_options_and_what_they_take_are_offered(offer: Offer) -> None:
    assert {"--config", "--set", "--resume", "--json", "--quiet"} <= offer("train", "--")
    assert "--sharding" in offer("checkpoint", "convert", "--")
    assert "--sharding" not in offer("checkpoint", "inspect", "--")
    assert offer("doctor", "--device", "") >= {"cpu", "cuda"}
    assert "row_wise" in offer("checkpoint", "convert", "--sharding", "")


def test_configuration_files_folders_and_settings_are_offered(offer: Offer) -> None:
    files = offer("train", "--config", "")
    assert {"a.yaml", "configs"} <= files and "c.txt" not in files
    folders = offer("watch", "")
    assert {"runs", "configs"} <= folders and "c.txt" not in folders
    assert {s.rstrip("=") for s in offer("train", "--set", "sharding.ty")} == {"sharding.type"}


def test_nothing_is_offered_where_nobody_knows(offer: Offer) -> None:
    assert offer("simulate", "--ranks", "") == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_have_no_mistakes_of_syntax(shell: str, scripts: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    run([shell, "-n", str(scripts / shell)], tmp_path)


def test_the_command_prints_the_script(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == (scripts / shell).read_text()
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])


def test_every_argument_says_what_it_takes() -> None:
    """Whoever adds one decides: a name that is in no table is an error, one that is gone, too."""
    tree = tree_of(parser_of(), {})
    assert {command.path[0] for command in tree.commands} == set(COMMANDS)
    dests = {
        action.dest
        for name in COMMANDS
        for parser in parsers_below(name)
        for action in parser._actions
    }
    assert set(TAKES) <= dests


def parsers_below(name: str) -> list[argparse.ArgumentParser]:
    (commands,) = parser_of([name])._subparsers._group_actions  # type: ignore[union-attr]
    parser = commands.choices[name]  # type: ignore[index]
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [parser, *(below for action in inner for below in action.choices.values())]
