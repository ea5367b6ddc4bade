"""Where a shard is, in the words of torch's plans."""

from torch.distributed.remote_device import _remote_device as RemoteDevice

__all__ = ["RemoteDevice"]
