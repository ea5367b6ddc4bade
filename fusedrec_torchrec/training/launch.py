"""Starts the ranks of a run on this machine, as torchrun does."""

import os
import sys
from collections.abc import Sequence

import torch.distributed.run as torchrun

from fusedrec_torchrec.training.config import LaunchConfig

__all__ = ["launch"]


def launch(
    config: LaunchConfig, arguments: Sequence[str], module: str = "fusedrec_torchrec.training"
) -> None:
    """Runs ``python -m module`` on all ranks of this machine.

    Raises:
        ChildFailedError: a rank failed, and restarts are used up.
    """
    least = config.min_nodes or config.nodes
    command = [f"--nnodes={least}:{config.nodes}", f"--nproc-per-node={config.ranks}"]
    command += [f"--max-restarts={config.max_restarts}"]
    if config.nodes == 1:
        command.append("--standalone")
    else:
        command += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={config.rendezvous}",
            f"--rdzv-id={config.job}",
        ]
    if config.max_restarts or least < config.nodes:
        # Otherwise torch keeps one store for all rounds (seen with 2.13): ranks may find addresses
        # of the round before in it, and a machine that comes later waits in vain.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    parsed = torchrun.parse_args([*command, "-m", module, *arguments])
    sys.stdout.flush()
    torchrun.run(parsed)
