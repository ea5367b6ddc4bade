"""What the files of a checkpoint are called, and what its tables are exported to."""

from typing import Literal, get_args

__all__ = ["FORMATS", "METADATA_FILE", "ExportFormat"]

METADATA_FILE = ".metadata"  # of torch.distributed.checkpoint
ExportFormat = Literal["safetensors", "parquet"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
