"""Runs a case sharded, on real ranks, and compares it with the unsharded run."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor

from tests.case import Case, Table, batch, coefficients, local_device, prefix, sharded
from tests.emulated_cuda import is_emulated
from tests.reference import Run, unsharded_run

UNIT_ROUNDOFF = 2.0**-24
Bound = torch.Tensor | float
NOT_ON_ALL_RANKS = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "fused_table_wise",
    "fused_column_wise",
)


def train_step(
    case: Case, model: torch.nn.Module, step: int, optimizer: Any = None
) -> dict[str, torch.Tensor]:
    """Forward, backward and update on this rank's batch; returns the outputs."""
    rank = dist.get_rank()
    if optimizer is not None:
        optimizer.zero_grad()
    outputs = model(batch(case, step, rank).to(local_device(case)))
    loss = torch.zeros((), device=local_device(case))
    for name, output in outputs.items():
        loss = (
            loss + (output * coefficients(case, step, rank, name, output).to(output.device)).sum()
        )
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
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        return [
            (tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True)), part)
            # Without shards there is still one offset.
            for part, offsets in zip(local.local_shards(), local.local_offsets(), strict=False)
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


def bound_of_sum(terms: int, magnitude: Bound) -> Bound:
    """How far two float32 sums of the same terms in different order can be apart.

    Each is off by at most (terms - 1) roundings of at most the sum of magnitudes.
    """
    return 2 * max(terms, 1) * UNIT_ROUNDOFF * magnitude


def close(got: torch.Tensor, want: torch.Tensor, bound: Bound, what: str) -> None:
    got, want = got.detach().cpu().float(), want.detach().float()
    assert got.shape == want.shape, f"{what}: shape {got.shape}, should be {want.shape}"
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    error = (got - want).abs()
    worst = float(error.max()) if error.numel() else 0.0
    assert bool((error <= bound).all()), f"{what}: off by {worst}, bound {bound}"


def same_sums(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    """Compares the results of two runs of the same sums, to the last bit.

    A GPU adds up the gradients of a row in the order in which programs come to it, so two runs on a
    real one are apart by roundings, which a few steps make larger.
    """
    if got.is_cuda and not is_emulated():
        within_roundings(got, want, what)
    else:
        assert torch.equal(got, want), what


def within_roundings(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")


def uses_half(case: Case) -> bool:
    return any(t.dtype == "fp16" for t in case.tables) or case.output_dtype == "fp16"


def inexact_stock_means(case: Case) -> set[str]:
    """Tables that TorchRec pools inexactly: it adds 1e-6 to the divisor of row-wise means."""
    return {t.name for t in case.tables if t.sharding == "row_wise" and t.pooling == "mean"}


def check(case: Case, run: Run, outputs: list[dict[str, torch.Tensor]], model: Any) -> None:
    """Outputs of all steps, weights and optimizer state after the last one, of this rank.

    Bit for bit, where a case's sums are exact; else within the bound of their summation order.
    """
    for step, got in enumerate(outputs):
        check_outputs(case, step, got, run.outputs[step][dist.get_rank()])
    state_dict, states = model.state_dict(), optimizer_states(model)
    for t in case.tables:
        check_weight(case, t, run, state_dict[f"sparse.{prefix(case)}.{t.name}.weight"])
        want = run.states[t.name]
        # Not there: optimized by the dense optimizer, or not on this rank.
        if want is not None and (t.name in states or t.sharding not in NOT_ON_ALL_RANKS):
            check_state(case, t, run, states[t.name], want)


def check_outputs(
    case: Case, step: int, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]
) -> None:
    inexact = inexact_stock_means(case)
    inexact_features = {f for t in case.tables if t.name in inexact for f in t.feature_names}
    # After a step of AdaGrad the weights are not integers any more.
    exact = case.integers and (case.optimizer == "sgd" or step == 0)
    assert got.keys() == want.keys()
    for name in want:
        magnitude = float(want[name].abs().max()) + 8.0 if want[name].numel() else 0.0
        bound: Bound = 0.0
        if uses_half(case):
            bound = 2.0**-9 * magnitude * max(case.lengths)
        elif name in inexact_features:
            bound = 2e-6 * magnitude
        elif not exact:
            bound = bound_of_sum(8 * max(case.lengths) * (step + 1), magnitude)
        close(got[name], want[name], bound, f"output {name} of step {step}")


def check_weight(case: Case, t: Table, run: Run, value: Any) -> None:
    for where, part in local_parts(value):
        want = run.weights[t.name][where]
        bound: Bound = 0.0
        if uses_half(case):
            bound = 2.0**-8 * (want.abs() + case.learning_rate * case.steps)
        elif not case.integers:
            # SGD: the sums of gradients.  AdaGrad: the relative error of a gradient of one sign,
            # at most three times in the normalized step (numerator, and twice in the root).
            magnitude: Bound = (
                case.learning_rate * run.sums[t.name][where]
                if case.optimizer == "sgd"
                else 3.0 * case.learning_rate * case.steps
            )
            roundings = 8 * UNIT_ROUNDOFF * case.steps * (1 + want.abs())
            bound = bound_of_sum(run.terms[t.name], magnitude) + roundings
        elif t.name in inexact_stock_means(case):
            bound = 2e-6 * case.learning_rate * run.sums[t.name][where]
        elif case.optimizer != "sgd":
            # Equal gradients; only the last bits of root and quotient may differ.
            bound = 4 * UNIT_ROUNDOFF * case.steps * (1 + want.abs())
        close(part, want, bound, f"weight of {t.name}")


def check_state(case: Case, t: Table, run: Run, value: Any, whole: torch.Tensor) -> None:
    for where, part in local_parts(value):
        want = whole[where[: whole.dim()]]
        bound: Bound = 0.0
        if uses_half(case):
            bound = 2.0**-8 * want.abs()
        elif not case.integers:
            bound = 3 * bound_of_sum(run.terms[t.name] + t.dim, 1.0) * want.abs()
        else:
            # Squares of whole numbers of 1/32 are exact up to here.
            roundings = bound_of_sum(case.steps + t.dim, 1.0) * want.abs()
            bound = torch.where(want < 2.0**10, 0.0, roundings)
        close(part.view_as(want), want, bound, f"optimizer state of {t.name}")


def whole(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A sharded weight or state put together, on every rank; each element is on one rank."""
    table = torch.zeros_like(like)
    for where, part in local_parts(value) if value is not None else []:
        table[where[: like.dim()]] = part.view_as(table[where[: like.dim()]])
    dist.all_reduce(table)
    return table


def check_bits(case: Case, model: Any, stock_model: Any) -> None:
    """Where sums are exact, weights and state equal stock's bit for bit, whatever the optimizer.

    Both use FBGEMM's update, so unlike in the comparison with plain torch no rounding differs.
    """
    state_dicts = model.state_dict(), stock_model.state_dict()
    states = optimizer_states(model), optimizer_states(stock_model)
    for t in case.tables:
        key = f"sparse.{prefix(case)}.{t.name}.weight"
        ours, stock = (whole(s[key], torch.zeros(t.rows, t.dim)) for s in state_dicts)
        assert torch.equal(ours, stock), f"weight of {t.name}"
        if case.optimizer != "sgd":
            shape = (t.rows, t.dim) if case.optimizer == "adagrad" else (t.rows,)
            ours, stock = (whole(s.get(t.name), torch.zeros(shape)) for s in states)
            assert torch.equal(ours, stock), f"optimizer state of {t.name}"
            assert float(ours.sum()) > 0


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
        if case.integers and not uses_half(case):
            check_bits(case, model, stock_model)
