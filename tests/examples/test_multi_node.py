"""The script for several machines: plans, trains and goes on; says what is wrong on a machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.command import ROOT
from tests.machines import Machine, machines, needs_machines
from tests.training.runs import small
from tests.training.test_rendezvous import free_port
from tests.warm import interpreter

SCRIPT = ROOT / "examples" / "multi_node.sh"
CLUSTER = ROOT / "configs" / "clusters" / "cpu_ethernet.yaml"
DEADLINE_SECONDS = 240
PORT = 29500  # namespaces have ports of their own


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Returns one in which the commands of the package are installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in (
        ("fusedrec", f"{interpreter()} -m fusedrec_torchrec.cli.main"),
        ("torchrun", f"{interpreter()} -m torch.distributed.run"),
        ("python", sys.executable),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    config = small(tmp_path / "unused", steps=6, eval_every=0, checkpoint={"every": 6})
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    own = {"NODES": "2", "RANKS": "1", "CONFIG": str(tmp_path / "train.yaml")}
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **own}


def without_gpus(folder: Path) -> None:
    """Puts an nvidia-smi there that fails as it does where the driver is not loaded."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    program.chmod(0o755)


def start(
    arguments: list[str], environment: dict[str, str], prefix: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*prefix, "bash", str(SCRIPT), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(scripts: list["subprocess.Popen[str]"]) -> list[str]:
    """Waits for the scripts of all machines, which must succeed; returns what they have written."""
    try:
        outputs = [script.communicate(timeout=DEADLINE_SECONDS)[0] for script in scripts]
    finally:
        for script in scripts:
            script.kill()
    assert [script.returncode for script in scripts] == [0] * len(scripts), "\n\n".join(outputs)
    return outputs


def steps_of(shared: Path) -> list[int]:
    records = (shared / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(record)["step"] for record in records]


def test_two_launchers_plan_train_and_go_on(tmp_path: Path, environment: dict[str, str]) -> None:
    """Two on this machine, as if they were two machines; their nvidia-smi finds no driver."""
    without_gpus(tmp_path / "bin")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "cluster.yaml").write_text(CLUSTER.read_text())  # as if measured before
    for steps in ("6", "8"):
        endpoint = f"127.0.0.1:{free_port()}"
        arguments = [endpoint, str(shared), f"steps={steps}"]
        outputs = finish(
            [start(arguments, {**environment, "IS_HOST": is_host}) for is_host in ("true", "false")]
        )
        assert all("2 machines, 1 ranks here (cpu), through lo (127.0.0.1)" in o for o in outputs)
        assert all("measuring" not in output for output in outputs)
        assert all(("going on from the last" in o) == (steps == "8") for o in outputs)
        assert sum("eval auc" in output for output in outputs) == 1  # of the first rank
    assert steps_of(shared)[-1] == 8 and 6 in steps_of(shared)
    assert (shared / "run" / "checkpoints" / "step_00000008").is_dir()
    plan = yaml.safe_load((shared / "run" / "plan.yaml").read_text())
    assert plan["ranks"] == 2 and set(plan["tables"]) == {"a", "b", "c"}


@pytest.mark.slow
@needs_machines
def test_two_machines_measure_plan_and_train(tmp_path: Path, environment: dict[str, str]) -> None:
    """In network namespaces, whose host names resolve to loopback; each finds its own role."""
    shared = tmp_path / "shared"

    def run(machine: Machine) -> "subprocess.Popen[str]":
        arguments = [f"10.77.0.1:{PORT}", str(shared)]
        return start(arguments, {**environment, "RATES_OF": str(CLUSTER)}, machine.prefix)

    with machines(2, tmp_path) as found:
        outputs = finish([run(machine) for machine in found])
    assert all("measuring the cluster" in output for output in outputs)
    assert all("through eth0 (10.77.0." in output for output in outputs)
    cluster = yaml.safe_load((shared / "cluster.yaml").read_text())
    assert cluster["ranks"] == 2 and cluster["between_nodes"]["all_to_all"] > 0
    assert steps_of(shared)[-1] == 6


@pytest.mark.parametrize(
    ("arguments", "changes", "problem"),
    [
        ([], {}, "usage: multi_node.sh FIRST_MACHINE:PORT SHARED_FOLDER [SETTING=VALUE ...]"),
        (["first-machine", "shared"], {}, "is 'first-machine', must be HOST:PORT, such as"),
        (["127.0.0.1:1", "shared"], {"CONFIG": "no.yaml"}, "CONFIG is 'no.yaml', which does not"),
        (["127.0.0.1:1", "/dev/null/x"], {}, "cannot make the folder '/dev/null/x', which must be"),
        (["127.0.0.1:1", "shared"], {"PATH": "/usr/bin:/bin"}, "activate the environment that has"),
        (["127.0.0.1:1", "shared"], {"INTERFACE": "eth99"}, "INTERFACE is 'eth99', which is not"),
        (["no-such-machine.invalid:1", "shared"], {}, "no way to the first machine, no-such-machi"),
        (["127.0.0.1:1", "shared", "stesp=3"], {}, "stesp is unknown; did you mean 'steps'"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    environment: dict[str, str],
    arguments: list[str],
    changes: dict[str, str],
    problem: str,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "cluster.yaml").write_text(CLUSTER.read_text())
    given = [str(shared) if argument == "shared" else argument for argument in arguments]
    done = subprocess.run(
        ["bash", SCRIPT, *given],
        cwd=ROOT,
        env={**environment, **changes},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and problem in done.stderr
    assert "Traceback" not in done.stderr
