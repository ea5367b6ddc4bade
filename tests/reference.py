"""The unsharded run, in plain torch: what every sharding must reproduce.

The forward pass is TorchRec's unsharded module; the optimizers are written out.
"""

from dataclasses import dataclass, field

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.case import (
    Case,
    batch,
    coefficients,
    initial_weight,
    outputs_by_name,
    prefix,
    unsharded,
)


@dataclass
class Run:
    """What a run leaves behind.

    Attributes:
        outputs: [step][rank][name] outputs of the module.
        weights: by table, after the last step.
        states: optimizer state by table (None for SGD).
        terms: by table, the largest number of gradients that met in one row in one step.
        sums: by table, the sum over steps of the sums of absolute gradients per element.
    """

    outputs: list[list[dict[str, torch.Tensor]]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor | None] = field(default_factory=dict)
    terms: dict[str, int] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


def unsharded_run(
    case: Case,
    world_size: int,
    learning_rates: list[float] | None = None,
    module: torch.nn.Module | None = None,
) -> Run:
    """Trains the unsharded module on all ranks' batches together.

    With a variable batch per feature, TorchRec's sharded EmbeddingCollection puts sequences in
    the order of the inverse indices and its unsharded one does not: there the reference trains
    on the batch written out in full.
    """
    module = unsharded(case, "cpu") if module is None else module
    parameters = dict(module.named_parameters())
    weights = {t.name: parameters[f"{prefix(case)}.{t.name}.weight"] for t in case.tables}
    states: dict[str, torch.Tensor | None] = {}
    run = Run()
    with torch.no_grad():
        for i, t in enumerate(case.tables):
            weights[t.name].copy_(initial_weight(case, i))
            states[t.name] = {
                "sgd": None,
                "adagrad": torch.zeros(t.rows, t.dim),
                "rowwise_adagrad": torch.zeros(t.rows),
            }[case.optimizer]
            run.terms[t.name] = 0
            run.sums[t.name] = torch.zeros(t.rows, t.dim)

    for step in range(case.steps):
        lr = learning_rates[step] if learning_rates else case.learning_rate
        batches = [batch(case, step, rank) for rank in range(world_size)]
        if case.vbe and case.kind == "ec":
            batches = [written_out(b) for b in batches]
        run.outputs.append([unsharded_outputs(case, module, b) for b in batches])
        loss = torch.zeros(())
        for rank, outputs in enumerate(run.outputs[-1]):
            for name, output in outputs.items():
                loss = loss + (output * coefficients(case, step, rank, name, output)).sum()
        module.zero_grad()
        if loss.requires_grad:
            (loss / world_size).backward()
        for t in case.tables:
            counts = torch.zeros(t.rows, dtype=torch.int64)
            for b in batches:
                for f in t.feature_names:
                    counts += torch.bincount(b[f].values().long(), minlength=t.rows)
            run.terms[t.name] = max(run.terms[t.name], int(counts.max()))
            grad = weights[t.name].grad
            if grad is not None:
                run.sums[t.name] += counts[:, None] * 4.0
                with torch.no_grad():
                    states[t.name] = update(case, lr, weights[t.name], grad.float(), states[t.name])
    run.outputs = [
        [{name: out.detach() for name, out in rank.items()} for rank in step]
        for step in run.outputs
    ]
    run.weights = {name: weight.detach() for name, weight in weights.items()}
    run.states = states
    return run


def unsharded_outputs(
    case: Case, module: torch.nn.Module, features: KeyedJaggedTensor
) -> dict[str, torch.Tensor]:
    if features.lengths().numel():
        return outputs_by_name(module(features))
    # TorchRec's unsharded module cannot split a batch of no samples.
    tables_of = {f: [t for t in case.tables if f in t.feature_names] for f in case.features}
    return {
        f if len(tables_of[f]) == 1 else f"{f}@{t.name}": torch.zeros(0, t.dim)
        for t in case.tables
        for f in t.feature_names
    }


def written_out(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch with a variable batch per feature as one with the same batch for all."""
    values: list[torch.Tensor] = []
    lengths: list[int] = []
    for feature, picks in zip(*features.inverse_indices(), strict=True):
        jagged = features[feature].to_dense()
        values.extend(jagged[int(pick)] for pick in picks)
        lengths.extend(len(jagged[int(pick)]) for pick in picks)
    return KeyedJaggedTensor(
        keys=features.keys(), values=torch.cat(values), lengths=torch.tensor(lengths)
    )


def update(
    case: Case, lr: float, weight: torch.Tensor, grad: torch.Tensor, state: torch.Tensor | None
) -> torch.Tensor | None:
    """One step of the optimizer, in place; rows without gradient stay as they are."""
    if case.optimizer == "sgd":
        weight.copy_(weight.float() - lr * grad)
        return None
    assert state is not None
    if case.optimizer == "adagrad":
        state += grad * grad
        step = lr / (state.sqrt() + case.eps) * grad
    else:
        state += (grad * grad).mean(dim=1)
        step = (lr / (state.sqrt() + case.eps)).unsqueeze(1) * grad
    weight.copy_(weight.float() - torch.where(grad != 0, step, torch.zeros_like(step)))
    return state
