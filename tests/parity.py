"""Runs a case sharded, on real ranks, and compares it with the unsharded run."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.case import Case, batch, coefficients, prefix, sharded
from tests.reference import Run, unsharded_run

UNIT_ROUNDOFF = 2.0**-24


def train_step(
    case: Case, model: torch.nn.Module, step: int, optimizer: Any = None
) -> dict[str, torch.Tensor]:
    """Forward, backward and update on this rank's batch; returns the outputs."""
    rank = dist.get_rank()
    if optimizer is not None:
        optimizer.zero_grad()
    outputs = model(batch(case, step, rank))
    loss = torch.zeros(())
    for name, output in outputs.items():
        loss = loss + (output * coefficients(case, step, rank, name, output)).sum()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return {name: output.detach() for name, output in outputs.items()}


def dense_optimizer(case: Case, model: DistributedModelParallel) -> torch.optim.Optimizer | None:
    """Data-parallel tables are trained by an optimizer of the user's; here SGD."""
    names = {t.name for t in case.tables if t.sharding == "data_parallel"}
    parameters = [p for key, p in model.named_parameters() if key.split(".")[-2] in names]
    return torch.optim.SGD(parameters, lr=case.learning_rate) if parameters else None


def local_parts(value: Any) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
    """(where in the whole table, tensor) of each part of a state on this rank."""
    if isinstance(value, ShardedTensor):
        return [
            (
                tuple(
                    slice(o, o + s)
                    for o, s in zip(
                        shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
                    )
                ),
                shard.tensor,
            )
            for shard in value.local_shards()
        ]
    return [((slice(None),), value)]


def optimizer_states(model: DistributedModelParallel) -> dict[str, Any]:
    """Optimizer state by table name."""
    found = {}
    for states in model.fused_optimizer.state_dict()["state"].values():
        for key, value in states.items():
            table, _, kind = key.rpartition(".")
            if kind == "momentum1":
                found[table] = value
    return found


def bound_of_sum(terms: int, magnitude: torch.Tensor | float) -> torch.Tensor | float:
    """How far two float32 sums of the same terms in different order can be apart.

    Each is off by at most (terms - 1) roundings of at most the sum of magnitudes.
    """
    return 2 * max(terms, 1) * UNIT_ROUNDOFF * magnitude


def close(case: Case, got: torch.Tensor, want: torch.Tensor, bound: Any, what: str) -> None:
    got, want = got.detach().float(), want.detach().float()
    assert got.shape == want.shape, f"{what}: shape {got.shape}, should be {want.shape}"
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    error = (got - want).abs()
    worst = float(error.max()) if error.numel() else 0.0
    assert bool((error <= bound).all()), f"{what}: off by {worst}, bound {bound}"


def check(case: Case, run: Run, outputs: list[dict[str, torch.Tensor]], model: Any) -> None:
    """Outputs of all steps, weights and optimizer state after the last one, of this rank."""
    rank = dist.get_rank()
    half = any(t.dtype == "fp16" for t in case.tables) or case.output_dtype == "fp16"
    drift = case.integers and case.optimizer != "sgd"
    # TorchRec adds 1e-6 to the divisor of its row-wise mean pooling.
    stock_mean = {
        t.name for t in case.tables if t.sharding == "row_wise" and t.pooling == "mean"
    }
    stock_mean_features = {f for t in case.tables if t.name in stock_mean for f in t.feature_names}
    for step, got in enumerate(outputs):
        want = run.outputs[step][rank]
        assert got.keys() == want.keys()
        for name in want:
            magnitude = float(want[name].abs().max()) + 8.0 if want[name].numel() else 0.0
            bound = 0.0
            if half:
                bound = 2.0**-9 * magnitude * max(case.lengths)
            elif not case.integers or (drift and step):
                bound = float(bound_of_sum(8 * max(case.lengths) * (step + 1), magnitude))
            if name in stock_mean_features:
                bound = 2e-6 * magnitude
            close(case, got[name], want[name], bound, f"output {name} of step {step}")
    state_dict = model.state_dict()
    states = optimizer_states(model)
    for t in case.tables:
        key = f"sparse.{prefix(case)}.{t.name}.weight"
        terms = run.terms[t.name]
        for where, part in local_parts(state_dict[key]):
            want = run.weights[t.name][where]
            bound: Any = 0.0
            if half:
                bound = 2.0**-8 * (want.abs() + case.learning_rate * case.steps)
            elif not case.integers:
                # SGD: the sums of gradients; AdaGrad: relative error of a gradient of one
                # sign, at most three times in the normalized step (numerator, twice root).
                magnitude = (
                    case.learning_rate * run.sums[t.name][where]
                    if case.optimizer == "sgd"
                    else 3.0 * case.learning_rate * case.steps
                )
                bound = bound_of_sum(terms, magnitude) + 8 * UNIT_ROUNDOFF * case.steps * (
                    1 + want.abs()
                )
            elif t.name in stock_mean:
                bound = 2e-6 * case.learning_rate * run.sums[t.name][where]
            elif drift:
                # Equal gradients; only the last bits of root and quotient may differ.
                bound = 4 * UNIT_ROUNDOFF * case.steps * (1 + want.abs())
            close(case, part, want, bound, f"weight of {t.name}")
        if run.states[t.name] is None:
            continue
        if t.name not in states and t.sharding in ("data_parallel", "table_wise"):
            continue  # optimized by the dense optimizer, or not on this rank
        for where, part in local_parts(states[t.name]):
            want_state = run.states[t.name]
            assert want_state is not None
            want = want_state[where[: want_state.dim()]]
            bound = 0.0
            if half:
                bound = 2.0**-8 * want.abs()
            elif not case.integers:
                bound = 3 * bound_of_sum(terms + t.dim, 1.0) * want.abs()
            close(case, part.view_as(want), want, bound, f"optimizer state of {t.name}")


def run_and_check(case: Case, also_stock: bool = False) -> None:
    """On every rank: trains the case and compares with the unsharded run."""
    world_size = dist.get_world_size()
    run = unsharded_run(case, world_size)
    model = sharded(case)
    dense = dense_optimizer(case, model)
    outputs = [train_step(case, model, step, dense) for step in range(case.steps)]
    check(case, run, outputs, model)
    if also_stock:
        stock = case.only("table_wise")
        stock_model = sharded(stock)
        stock_outputs = [train_step(stock, stock_model, step) for step in range(case.steps)]
        check(stock, run, stock_outputs, stock_model)
