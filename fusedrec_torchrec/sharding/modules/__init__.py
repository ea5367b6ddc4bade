"""The sharded modules: TorchRec's own, which also know ``fused_row_wise``.

Fused and stock tables live side by side in one module; everything but the fused tables' stages
is inherited: state dicts, optimizers, pipelines, stock shardings.
"""
