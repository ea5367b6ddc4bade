"""Runs one rank of a training: ``torchrun -m fusedrec_torchrec.training``."""

from fusedrec_torchrec.training.main import main

main()
