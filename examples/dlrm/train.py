"""Trains a DLRM as a configuration file says, under plain torchrun.

torchrun --nproc-per-node 2 examples/dlrm/train.py --config configs/tiny.yaml

The program itself is ``fusedrec_torchrec.training``; ``fusedrec train`` starts the ranks, too.
"""

from fusedrec_torchrec.training.main import main

if __name__ == "__main__":
    main()
