"""Whole runs from the command line, with real launchers and real files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import ROOT, fusedrec, torchrun
from tests.training.data.criteo_text import lines, write
from tests.training.runs import small
from tests.warm import interpreter


def config(folder: Path, **changes: Any) -> Path:
    data = small(folder / "run", **changes)
    data["logging"] = {"directory": str(folder / "run"), "log_every": 5}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "run" / "metrics.jsonl").read_text()
    one_step = ("samples_per_second", "waiting_for_data", "stage_ms", "_per_step", "_by_rank")
    return [
        {k: v for k, v in json.loads(line).items() if not k.endswith(one_step)}
        for line in text.splitlines()
    ]


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_train_stop_resume_and_inspect(tmp_path: Path, cold: bool) -> None:
    path = config(tmp_path, checkpoint={"every": 10})
    done = fusedrec("train", "--config", path, cold=cold)
    assert done.returncode == 0, done.stderr
    for part in ("eval auc", "samples per second", "collectives per step", "bytes sent per step"):
        assert part in done.stdout
    assert "24/24" in done.stderr  # the progress bar
    run = tmp_path / "run"
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.*"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 24 and summary["all_to_all_per_step"] == 3
    whole = records(tmp_path)

    again = fusedrec("train", "--config", path)
    assert again.returncode == 2
    assert "holds a run already: use --resume" in again.stderr

    resumed = fusedrec("train", "--config", path, "--resume", run / "checkpoints/step_00000020")
    assert resumed.returncode == 0, resumed.stderr
    assert "20/24" in resumed.stderr  # goes on from step 20
    assert records(tmp_path) == whole

    other = fusedrec("train", "--config", path, "--resume", "--set", "data.batch_size=256")
    assert other.returncode == 2
    assert "is of a different run: data.batch_size is 256, was 128" in other.stderr

    shown = fusedrec("inspect", run)
    assert shown.returncode == 0 and "step_00000020" in shown.stdout
    assert "fused_row_wise" in shown.stdout
    shown = fusedrec("inspect", run / "checkpoints" / "step_00000020")
    assert shown.returncode == 0, shown.stderr
    assert "2 ranks" in shown.stdout
    assert re.search(
        r"b +3,000 x 8 +float32 +93\.8 KiB +fused_row_wise +2 +momentum1", shown.stdout
    )


def test_a_quiet_run_says_nothing_but_the_summary(tmp_path: Path) -> None:
    """Also where it reads text, and leaves out steps."""
    text = write(tmp_path / "train.txt", lines(700))
    criteo = {"files": [str(text)], "prepared": str(tmp_path / "prepared")}
    data = {"source": "criteo", "criteo": criteo, "batch_size": 64, "lanes": 4, "workers": 0}
    bad = {"policy": "skip"}
    dense = {"dense": {"type": "sgd", "learning_rate": 1e30}}
    changes = {"steps": 6, "eval_every": 0, "bad_batches": bad, "optimizer": dense}
    done = fusedrec(
        "train", "--config", config(tmp_path, tables=[], data=data, **changes), "--quiet"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"run {tmp_path / 'run'}\n") and "eval auc" in done.stdout
    assert re.search(r"skipped steps +[1-9]", done.stdout)
    for part in ("reading files", "step/s", "/6 [", "skipped bad"):
        assert part not in done.stderr


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done = fusedrec("train", "--config", config(tmp_path), "--resume")
    assert done.returncode == 2
    assert "nothing to resume" in done.stderr


def test_a_failing_run_is_exit_code_1_with_its_reason(tmp_path: Path) -> None:
    path = config(tmp_path)
    bad = "optimizer.dense={type: sgd, learning_rate: 1e30}"
    done = fusedrec("train", "--config", path, "--set", bad)
    assert done.returncode == 1
    assert re.search(r"bad gradients of step \d+.*learning rates", done.stderr.splitlines()[-1])


def start(path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fusedrec_torchrec.cli.main", "train", "--config", str(path)]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHON_EXEC": interpreter()},  # of the ranks
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(child) for child in children.split()]


def test_interrupting_is_exit_code_130_and_leaves_no_rank(tmp_path: Path) -> None:
    process = start(config(tmp_path, steps=100_000, checkpoint={"every": 10}))
    wait_for(tmp_path / "run" / "checkpoints" / "step_00000010", process)
    ranks = ranks_of(process)
    second = fusedrec("train", "--config", tmp_path / "config.yaml", "--resume")
    assert second.returncode == 2 and "in use by another training" in second.stderr
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    # A rank that was stopped may have left its progress bar in the middle of a line.
    assert errors.endswith("fusedrec train: stopped by SIGINT\n")
    assert ranks and not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
def test_plain_torchrun_trains_on_criteo_text(tmp_path: Path) -> None:
    """As one process a rank, with reader processes, from text that is prepared on the way."""
    text = write(tmp_path / "train.txt.gz", lines(2000))
    criteo = {"files": [str(text)], "prepared": str(tmp_path / "prepared"), "min_count": 2}
    data = {"source": "criteo", "criteo": criteo, "batch_size": 64, "lanes": 4, "workers": 1}
    path = config(tmp_path, tables=[], data=data, epochs=1, steps=None)
    arguments = ["--standalone", "--nproc-per-node", 2, "examples/dlrm/train.py"]
    done = torchrun(*arguments, "--config", path)
    assert done.returncode == 0, done.stderr
    assert records(tmp_path)[-1]["step"] == 1800 // 64
    assert (tmp_path / "prepared" / "manifest.json").exists()


def test_a_bad_file_stops_torchrun_with_a_clear_error(tmp_path: Path) -> None:
    criteo = {"files": [str(tmp_path / "no.txt")], "prepared": str(tmp_path / "prepared")}
    data = {"source": "criteo", "criteo": criteo, "batch_size": 64, "lanes": 4}
    path = config(tmp_path, tables=[], data=data)
    arguments = ["--standalone", "--nproc-per-node", 2, "-m", "fusedrec_torchrec.training"]
    done = torchrun(*arguments, "--config", path)
    assert done.returncode != 0
    assert re.search(r"data file .*no\.txt does not exist", done.stderr)


@pytest.mark.slow
def test_two_machines_train_together(tmp_path: Path) -> None:
    """Two launchers on this machine meet at one rendezvous, as two machines would."""
    port = _free_port()
    launch = {"nodes": 2, "ranks": 1, "rendezvous": f"127.0.0.1:{port}"}
    path = config(tmp_path, launch=launch)
    command = [sys.executable, "-m", "fusedrec_torchrec.cli.main", "train", "--config", str(path)]
    machines = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert sum("eval auc" in output for output in outputs) == 1
    alone = tmp_path / "alone"
    alone.mkdir()
    assert fusedrec("train", "--config", config(alone)).returncode == 0
    assert records(alone) == records(tmp_path)  # two ranks are two ranks


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_slurm_script_is_valid_and_runs_the_training(tmp_path: Path) -> None:
    """Runs it with stand-ins for Slurm's commands that print what they are asked to start."""
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    for name, body in {
        "scontrol": "echo node-1; echo node-2",
        "srun": 'echo "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "4",
    }
    done = subprocess.run(
        ["bash", script, "configs/multi_node.yaml", "--resume"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    started = done.stdout.split()
    assert "--nnodes=2" in started and "--nproc-per-node=4" in started
    assert "--rdzv-endpoint=node-1:29500" in started and "--rdzv-id=7" in started
    tail = ["-m", "fusedrec_torchrec.training", "--config", "configs/multi_node.yaml", "--resume"]
    assert started[-len(tail) :] == tail
    missing = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert missing.returncode != 0 and "usage: sbatch" in missing.stderr


def test_kubernetes_job_is_valid_and_runs_the_training() -> None:
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    command = container["command"]
    assert command[:3] == ["torchrun", "-m", "fusedrec_torchrec.training"]
    assert (ROOT / command[command.index("--config") + 1]).is_file()
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["movielens_like", "criteo_kaggle"])
def test_ready_configurations_run(tmp_path: Path, name: str) -> None:
    settings = [f"logging.directory={tmp_path / 'run'}", "steps=12", "eval_every=6"]
    settings += ["data.batch_size=128", "eval_batches=2", "checkpoint.every=6"]
    if name == "criteo_kaggle":
        text = write(tmp_path / "train.txt", lines(3000))
        settings += [f"data.criteo.files=[{text}]", f"data.criteo.prepared={tmp_path / 'out'}"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = fusedrec("train", "--config", f"configs/{name}.yaml", *arguments)
    assert done.returncode == 0, done.stderr
