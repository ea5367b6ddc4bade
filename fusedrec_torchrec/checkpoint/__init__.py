"""Checkpoints that fit every sharding and every number of ranks, TorchRec's included."""

from fusedrec_torchrec.checkpoint.load import LoadReport, load_checkpoint
from fusedrec_torchrec.checkpoint.save import SaveError, save_checkpoint

__all__ = ["LoadReport", "SaveError", "load_checkpoint", "save_checkpoint"]
