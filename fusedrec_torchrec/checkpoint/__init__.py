"""Checkpoints that fit every sharding and every number of ranks, TorchRec's included."""
