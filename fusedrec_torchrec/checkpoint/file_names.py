"""What the files of a checkpoint are called, and what its tables are exported to."""

from pathlib import Path
from typing import Literal, get_args

__all__ = ["FORMATS", "MANIFEST", "METADATA_FILE", "ExportFormat", "check_is_checkpoint"]

METADATA_FILE = ".metadata"  # of torch.distributed.checkpoint
MANIFEST = "manifest.json"
SIGNS = (MANIFEST, METADATA_FILE, "__0_0.distcp")  # of a checkpoint, whole or not
ExportFormat = Literal["safetensors", "parquet"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


def check_is_checkpoint(path: Path) -> None:
    """Refuses a path at which there is no checkpoint, not even a damaged one.

    Raises:
        ValueError: it is no folder, or the folder has no file of a checkpoint.
    """
    if not path.is_dir() or not any((path / name).exists() for name in SIGNS):
        raise ValueError(
            f"{path} is no checkpoint of torch.distributed.checkpoint ({METADATA_FILE} is missing)"
        )
