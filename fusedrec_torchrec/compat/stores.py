"""Torch's stores, which ranks meet in; torch.distributed has them, but does not say so."""

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

__all__ = ["FileStore", "PrefixStore", "Store", "TCPStore"]
