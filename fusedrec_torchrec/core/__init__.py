"""What every part of the package may use; it knows nothing of embedding tables.

Files, in reading order:

- ``config``, ``safe_yaml``: YAML files as trees of dataclasses, read without trusting them;
- ``files``, ``folder_files``, ``json_file``: files that are whole or not there, files of a folder
  that somebody else made, JSON;
- ``terminal``: tables for people;
- ``device``: names of the devices;
- ``all_ranks``: what goes wrong on one rank is raised on all;
- ``lost_rank``: a rank that hangs or dies is named on all others;
- ``fingerprint``: what all ranks were given is compared before a difference can do harm;
- ``stages``: names for the stages of a step, in profiles and stopwatches;
- ``collective_counter``: counts collectives and the bytes they send;
- ``buffers``, ``buffer_order``, ``kept``, ``transfer``, ``max_abs``: small helpers for tensors;
- ``processes``: processes that do not outlive those they work for;
- ``native``: C++ operators for the hot loops on CPU;
- ``gpu``: Triton kernels for the same on CUDA;
- ``operators``: where they can be used.
"""
