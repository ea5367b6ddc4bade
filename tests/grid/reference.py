"""2D training in plain torch: a whole model for each group, averaged every few steps."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from tests.case import Case, batch, coefficients, initial_weight, prefix, unsharded
from tests.reference import unsharded_outputs, update


def groups_of(grid: fr.GridOptions, ranks: int) -> list[list[int]]:
    """Ranks of each group."""
    groups = ranks // grid.sharding_group_size
    if grid.layout == "groups_adjacent":
        size = grid.sharding_group_size
        return [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    return [list(range(g, ranks, groups)) for g in range(groups)]


@dataclass
class GridRun:
    """What a run leaves behind.

    Attributes:
        outputs: [step][rank][name].
        weights, states: [group][table] after the last step; states are None for SGD.
    """

    outputs: list[dict[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor | None]] = field(default_factory=list)


def grid_run(case: Case) -> GridRun:
    """Every group trains a model of its own on its ranks' batches."""
    assert case.grid is not None
    every, sync_states = case.grid.sync_every, case.grid.sync_optimizer_state
    groups = groups_of(case.grid, dist.get_world_size())
    modules = [unsharded(case, "cpu") for _ in groups]
    run = GridRun()
    for module in modules:
        parameters = dict(module.named_parameters())
        run.weights.append(
            {t.name: parameters[f"{prefix(case)}.{t.name}.weight"] for t in case.tables}
        )
        run.states.append({})
        for i, t in enumerate(case.tables):
            with torch.no_grad():
                run.weights[-1][t.name].copy_(initial_weight(case, i))
            run.states[-1][t.name] = {
                "sgd": None,
                "adagrad": torch.zeros(t.rows, t.dim),
                "rowwise_adagrad": torch.zeros(t.rows),
            }[case.optimizer]
    for step in range(case.steps):
        run.outputs.append({})
        for g, ranks in enumerate(groups):
            _train_group(case, step, ranks, modules[g], run, g)
        if (step + 1) % every == 0:
            for t in case.tables:
                _average([weights[t.name] for weights in run.weights])
                states = [of_group[t.name] for of_group in run.states]
                if sync_states and states[0] is not None:
                    _average([state for state in states if state is not None])
    return run


def _train_group(
    case: Case, step: int, ranks: list[int], module: torch.nn.Module, run: GridRun, g: int
) -> None:
    loss = torch.zeros(())
    for rank in ranks:
        outputs = unsharded_outputs(case, module, batch(case, step, rank))
        run.outputs[-1][rank] = {name: out.detach() for name, out in outputs.items()}
        for name, output in outputs.items():
            loss = loss + (output * coefficients(case, step, rank, name, output)).sum()
    module.zero_grad()
    (loss / len(ranks)).backward()
    with torch.no_grad():
        for t in case.tables:
            weight = run.weights[g][t.name]
            if weight.grad is not None:
                run.states[g][t.name] = update(
                    case, case.learning_rate, weight, weight.grad.float(), run.states[g][t.name]
                )


@torch.no_grad()
def _average(replicas: list[torch.Tensor]) -> None:
    mean = torch.stack([r.float() for r in replicas]).mean(0)
    for replica in replicas:
        replica.copy_(mean)
