"""``fusedrec doctor``: is this installation whole, and does it compute what it should?

Files, in reading order:

- ``privacy``: takes out of texts whose machine they are from;
- ``findings``: what was looked at, with what result, and the one file that a user sends;
- ``installation``: versions, operators, kernels, GPUs and how they reach each other;
- ``machine``: compiler, backends, shared memory, file handles, and the file system that runs go to;
- ``comparison``: what is trained, and how far from the unsharded module it may be;
- ``benchmark``: a few timed steps beside TorchRec's;
- ``rank``: one rank of both, in a process of its own;
- ``examination``: all of it.
"""
