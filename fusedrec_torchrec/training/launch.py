"""Starts the ranks of a run on this machine, as torchrun does."""

import os
import sys
from collections.abc import Sequence

import torch.distributed.run as torchrun

from fusedrec_torchrec.training.config import LaunchConfig
from fusedrec_torchrec.training.rendezvous import rendezvous

__all__ = ["launch"]


def launch(
    config: LaunchConfig, arguments: Sequence[str], module: str = "fusedrec_torchrec.training"
) -> None:
    """Runs ``python -m module`` on all ranks of this machine.

    Raises:
        ChildFailedError: a rank failed, and restarts are used up.
        LostMachineError: the machines do not meet, or lose each other.
        ValueError: the settings cannot work on this machine.
    """
    least = config.min_nodes or config.nodes
    command = [f"--nnodes={least}:{config.nodes}", f"--nproc-per-node={config.ranks}"]
    command += [f"--max-restarts={config.max_restarts}"]
    if config.max_restarts or least < config.nodes:
        # Otherwise torch keeps one store for all rounds (seen with 2.13): ranks may find addresses
        # of the round before in it, and a machine that comes later waits in vain.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    start = ["-m", module, *arguments]
    sys.stdout.flush()
    if config.nodes == 1:
        torchrun.run(torchrun.parse_args([*command, "--standalone", *start]))
        return
    with rendezvous(config) as meeting:
        command += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meeting.endpoint}",
            f"--rdzv-id={config.job}",
            f"--rdzv-conf=is_host={str(meeting.is_host).lower()},"
            f"join_timeout={config.timeout_seconds},"
            f"read_timeout={min(max(config.timeout_seconds, 10), 60)}",
            f"--local-addr={meeting.interface.address}",
        ]
        torchrun.run(torchrun.parse_args([*command, *start]))
