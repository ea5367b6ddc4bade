"""Half an hour of training with bad batches, killed ranks and checkpoints: does anything get lost?

    python benchmarks/soak.py --minutes 30 --document docs/reliability.md

A run of ``configs/tiny.yaml`` on data with bad samples, policy ``skip``.  In the first third of the
time a random rank is killed every so often; after that the ranks live on, and their memory is
watched.  Then the same steps are trained without any kill, and both must end with the same weights
and optimizer state, to the last bit.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from ranks import write_into

from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.run_state import find_checkpoints

ROOT = Path(__file__).parent.parent
CHECKPOINT_EVERY = 200
MARK = "FUSEDREC_SOAK"  # in the environment of all processes of the run, orphans included
SAMPLE_SECONDS = 5.0
MOST_GROWTH = 1.05  # of the memory of all processes, in the time without kills


Memory = tuple[float, list[float], float, int]  # seconds, MB of each rank, MB of all, processes


def command(folder: Path, steps: int, restarts: int) -> list[str]:
    settings = {
        "steps": steps,
        "eval_every": 0,
        "eval_batches": 10,
        "logging.directory": folder,
        "logging.log_every": 20,
        "logging.tensorboard": "false",
        "checkpoint.every": CHECKPOINT_EVERY,
        "bad_batches": "{policy: skip, most: null}",
    }
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(f"--max-restarts={restarts}", str(ROOT / "benchmarks" / "soak_rank.py")),
        *("--config", str(ROOT / "configs" / "tiny.yaml"), *given),
    ]


def start(folder: Path, steps: int, restarts: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        MARK: str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    log = (folder.parent / f"{folder.name}.log").open("w")
    return subprocess.Popen(
        command(folder, steps, restarts),
        cwd=ROOT,
        stderr=log,
        stdout=log,
        env=environment,
        text=True,
    )


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def resident(pid: int) -> float | None:
    """Returns the MB of a process; None if it is gone."""
    try:
        match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(match[1]) / 1024 if match else None


def all_resident() -> tuple[float, int]:
    """Returns the MB and the number of all processes of the run, those left behind included."""
    mark = f"{MARK}={os.getpid()}".encode()
    sizes = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                ours = mark in (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or not ours to look at
                continue
            if ours and (size := resident(int(folder.name))) is not None:
                sizes.append(size)
    return sum(sizes), len(sizes)


def steps_done(folder: Path) -> int:
    records = read_log(folder)
    return int(records[-1]["step"]) if records else 0


def soak(folder: Path, minutes: float, kills: int) -> dict[str, Any]:
    """Trains until the time is over, then to the next checkpoint."""
    chance = random.Random(1)
    begun, process = time.monotonic(), start(folder, 10**7, kills + 5)
    when = sorted(chance.uniform(20, minutes * 20) for _ in range(kills))
    memory: list[Memory] = []
    killed = 0
    while (now := time.monotonic() - begun) < minutes * 60:
        if process.poll() is not None:
            sys.exit(f"the run ended by itself: see {folder.parent / folder.name}.log")
        ranks = children(process.pid)
        sizes = [size for pid in ranks if (size := resident(pid)) is not None]
        if len(sizes) == 2:
            memory.append((now, sizes, *all_resident()))
        if killed < kills and now > when[killed] and len(ranks) == 2 and steps_done(folder):
            os.kill(chance.choice(ranks), signal.SIGKILL)
            killed += 1
        time.sleep(SAMPLE_SECONDS)
    process.terminate()
    process.wait(timeout=120)
    last = find_checkpoints(folder / "checkpoints")[-1]
    return {"killed": killed, "step": int(last.name[5:]), "memory": memory, "last": str(last)}


def same(first: Path, second: Path) -> bool:
    a, b = Contents(first).reader, Contents(second).reader
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(a.whole(name), b.whole(name)) for name in a.tensors
    )


def growth(memory: list[Memory], minutes: float) -> list[tuple[float, float]]:
    """Returns MB of a rank, MB and number of all processes: when kills are over, at the end."""
    calm = [sample for sample in memory if sample[0] > minutes * 20 + 90]
    tenth = max(len(calm) // 10, 1)
    values = [(max(sizes), total, number) for _, sizes, total, number in calm]
    return [
        (
            statistics.median(value[k] for value in values[:tenth]),
            statistics.median(value[k] for value in values[-tenth:]),
        )
        for k in range(3)
    ]


def draw(memory: list[Memory], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    minutes = [sample[0] / 60 for sample in memory]
    for rank in range(2):
        sizes = [sample[1][rank] for sample in memory]
        axes.plot(minutes, sizes, label=f"rank {rank}", linewidth=1)
    totals = [sample[2] for sample in memory]
    axes.plot(minutes, totals, label="all processes", linewidth=1)
    axes.set_xlabel("minutes")
    axes.set_ylabel("MB resident")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--document", type=Path, help="file whose marked part gets the results")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists already")
    folder.mkdir(parents=True)
    result = soak(folder / "soak", arguments.minutes, arguments.kills)
    step = result["step"]
    print(f"{step} steps, {result['killed']} kills; the same steps without kills", flush=True)
    alone = start(folder / "alone", step, 0)
    if alone.wait() != 0:
        sys.exit(f"the run without kills failed: see {folder / 'alone.log'}")
    last = find_checkpoints(folder / "alone" / "checkpoints")[-1]
    damaged = verify(Path(result["last"]))
    equal = last.name == Path(result["last"]).name and same(Path(result["last"]), last)
    skipped = [
        json.loads((path / "run.json").read_text())["skipped"]
        for path in (last, Path(result["last"]))
    ]
    rank_memory, all_memory, processes = growth(result["memory"], arguments.minutes)
    saves = step // CHECKPOINT_EVERY
    lines = [
        f"- {arguments.minutes:g} minutes, {step:,} steps, {saves} checkpoints, "
        f"{result['killed']} ranks killed",
        f"- {skipped[1]} steps skipped because of bad batches, {skipped[0]} without kills",
        f"- weights and optimizer state {'equal' if equal else 'DIFFER from'} those of the run "
        f"without kills, to the last bit; files damaged: {len(damaged)}",
        f"- memory of the larger rank in the time without kills: {rank_memory[0]:.0f} MB at its "
        f"beginning, {rank_memory[1]:.0f} MB at its end",
        f"- memory of all processes, launcher, readers and what kills might have left behind: "
        f"{all_memory[0]:.0f} MB and {all_memory[1]:.0f} MB, in {processes[0]:.0f} and "
        f"{processes[1]:.0f} processes",
    ]
    print("\n".join(lines))
    (folder / "memory.json").write_text(json.dumps(result["memory"]))
    if arguments.document is not None:
        draw(result["memory"], arguments.document.parent / "figures" / "soak_memory.png")
        write_into(arguments.document, "soak", "\n".join(lines))
    grown = all_memory[1] > all_memory[0] * MOST_GROWTH
    if not equal or damaged or skipped[0] != skipped[1] or grown:
        sys.exit(1)


if __name__ == "__main__":
    main()
