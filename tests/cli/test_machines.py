"""Several machines, each with a network and a host name of its own, train together.

Their host names resolve to loopback, as Debian's do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusedrec_torchrec.cli.main import main
from tests.cli.command import fusedrec
from tests.machines import Machine, finish, machines, needs_machines
from tests.training.runs import small
from tests.training.test_rendezvous import free_port

PORT = 29500  # namespaces have ports of their own
TRACES = ("Traceback", "frame #", "Exception raised from", "C++")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(2, tmp_path) as found:
        yield found


def config(folder: Path, **launch: Any) -> Path:
    settings = {"nodes": 2, "ranks": 1, "timeout_seconds": 60, **launch}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(small(folder / "run", steps=6, eval_every=0, launch=settings)))
    return path


@needs_machines
@pytest.mark.parametrize(
    ("rendezvous", "restarts"),
    [
        ("10.77.0.1", 0),
        pytest.param("machine0", 0, marks=pytest.mark.slow),
        pytest.param("10.77.0.2", 1, marks=pytest.mark.slow),  # ranks have a store of their own
    ],
)
def test_two_machines_whose_names_resolve_to_loopback(
    tmp_path: Path, two: list[Machine], rendezvous: str, restarts: int
) -> None:
    path = config(tmp_path, rendezvous=f"{rendezvous}:{PORT}", max_restarts=restarts)
    ended = finish([machine.start("train", "--config", path) for machine in two])
    assert [code for code, _ in ended] == [0, 0], ended
    assert sum("eval auc" in output for _, output in ended) == 1
    for _, output in ended:
        assert not [trace for trace in TRACES if trace in output], output


@needs_machines
@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_an_interface_that_leads_nowhere(tmp_path: Path, two: list[Machine], both: bool) -> None:
    """Adds an interface like Docker's bridge, which has the same address on every machine."""
    for machine in two:
        machine.run("ip", "link", "add", "docker0", "type", "bridge")
        machine.run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        machine.run("ip", "link", "set", "docker0", "up")
    path = config(tmp_path, rendezvous=f"10.77.0.1:{PORT}", timeout_seconds=30)
    wrong = ("--set", "launch.interface=docker0")
    ended = finish(
        [
            two[0].start("train", "--config", path, *(wrong if both else ())),
            two[1].start("train", "--config", path, *wrong),
        ]
    )
    assert [code for code, _ in ended] == [1, 1], ended
    last = [output.splitlines()[-1] for _, output in ended]
    if both:
        # Which of them is rank 0 depends on who comes first.
        first, second = sorted(last, key=lambda line: "cannot reach the store" in line)
        assert "172.17.0.1" in first and "rank 1 did not come within 30 s" in first
        assert "cannot reach the store of rank 0 at 172.17.0.1" in second
    else:
        for line in last:
            assert (
                "rank 0 on machine0 talks through eth0 (10.77.0.1) and cannot reach rank 1 on "
                "machine1, which talks through docker0 (172.17.0.1): nothing listens there"
            ) in line
    assert all("launch.interface" in line for line in last)


def test_the_second_machine_never_comes(tmp_path: Path) -> None:
    path = config(tmp_path, rendezvous=f"127.0.0.1:{free_port()}", timeout_seconds=1)
    done = fusedrec("train", "--config", path)
    assert done.returncode == 1
    assert "2 machines should meet" in done.stderr and "within 1 s" in done.stderr
    assert "there were only" in done.stderr and "Start the same command on every" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rendezvous_that_nobody_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    path = config(tmp_path, rendezvous=rendezvous, is_host=False, timeout_seconds=1)
    assert main(["train", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert f"cannot reach the rendezvous at {rendezvous} within 1 s" in error
    assert "nothing listens there" in error and "launch.is_host=true" in error


def test_an_interface_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, rendezvous="127.0.0.1:1", interface="eth99")
    assert main(["train", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "launch.interface is 'eth99', which is not an interface of this machine" in error
    assert "there are lo (127.0.0.1)" in error
