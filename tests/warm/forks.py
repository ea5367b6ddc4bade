"""The fork server of a test session: it has imported all that tests run in other processes."""

import multiprocessing as mp
from pathlib import Path

__all__ = ["CONTEXT"]

PACKAGE = Path(__file__).parents[2] / "fusedrec_torchrec"
OTHERS = [
    "matplotlib.pyplot",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "torchrec.distributed.train_pipeline",
    "torchrec.models.dlrm",
]


def _modules() -> list[str]:
    files = (path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py")))
    return [
        ".".join(path.with_suffix("").parts)
        for path in files
        if path.stem not in ("__init__", "__main__")
    ]


CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload([*OTHERS, *_modules()])
