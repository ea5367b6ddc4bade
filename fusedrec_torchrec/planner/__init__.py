"""A planner that extends TorchRec's, so that fused and stock tables are planned together."""
