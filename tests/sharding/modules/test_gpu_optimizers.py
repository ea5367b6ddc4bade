"""Adam and LAMB, which FBGEMM has on CUDA only: weights and moments equal those of plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.case import Case, Table, batch, coefficients, initial_weight, prefix, sharded, unsharded
from tests.cluster import Cluster
from tests.parity import local_parts, train_step
from tests.reference import unsharded_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

BETA1, BETA2, DECAY = 0.8, 0.95, 0.01
MOMENTS = {"momentum1": 0, "exp_avg": 0, "momentum2": 1, "exp_avg_sq": 1}


def in_plain_torch(case: Case, world_size: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Returns weights and moments of the unsharded module, by table, one row after another."""
    module = unsharded(case, "cpu")
    weights = {t.name: module.get_parameter(f"{prefix(case)}.{t.name}.weight") for t in case.tables}
    per_row = "rowwise" in case.optimizer
    state = {}
    with torch.no_grad():
        for i, t in enumerate(case.tables):
            weights[t.name].copy_(initial_weight(case, i))
            m, v = torch.zeros(t.rows, t.dim), torch.zeros(t.rows, 1 if per_row else t.dim)
            state[t.name] = weights[t.name], m, v
    for step in range(case.steps):
        module.zero_grad()
        batches = [batch(case, step, rank) for rank in range(world_size)]
        for rank, features in enumerate(batches):
            for name, output in unsharded_outputs(case, module, features).items():
                loss = (output * coefficients(case, step, rank, name, output)).sum()
                (loss / world_size).backward(retain_graph=True)
        for t in case.tables:
            used = torch.cat([b[f].values() for b in batches for f in t.feature_names]).unique()
            for row in used.tolist():
                w, m, v = (x.detach()[row] for x in state[t.name])
                one_row(case, step + 1, w, m, v, weights[t.name])
    return {name: tuple(x.detach() for x in of) for name, of in state.items()}


def one_row(
    case: Case, steps: int, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
) -> None:
    assert weight.grad is not None
    g = weight.grad[(w.storage_offset()) // weight.size(1)]
    m.mul_(BETA1).add_(g, alpha=1 - BETA1)
    v.mul_(BETA2).add_((g**2).mean() if v.numel() == 1 else g**2, alpha=1 - BETA2)
    corrected = (v / (1 - BETA2**steps)).sqrt() + case.eps
    step = m / (1 - BETA1**steps) / corrected + DECAY * w
    if "lamb" in case.optimizer:
        step *= torch.linalg.vector_norm(w) / torch.linalg.vector_norm(step)
    w.sub_(case.learning_rate * step)


def compare(case: Case) -> list[str]:
    """Returns which states were compared."""
    want = in_plain_torch(case, dist.get_world_size())
    model = sharded(case)
    for step in range(case.steps):
        train_step(case, model, step)
    state_dict: dict[str, Any] = model.state_dict()
    for t in case.tables:
        same(state_dict[f"sparse.{prefix(case)}.{t.name}.weight"], want[t.name][0], t.name)
    compared = []
    for states in model.fused_optimizer.state_dict()["state"].values():
        for key, value in states.items():
            table, _, kind = key.rpartition(".")
            if kind in MOMENTS:
                same(value, want[table][1 + MOMENTS[kind]], key)
                compared.append(key)
    return sorted(compared)


def same(value: Any, want: torch.Tensor, what: str) -> None:
    parts = local_parts(value)
    assert parts and float(want.abs().sum()) > 0
    for where, part in parts:
        own = want[where[0]]
        torch.testing.assert_close(
            part.cpu().view_as(own), own, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}"
        )


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("ebc", "fused"), ("ebc", "fused_uvm_caching"), ("weighted", "fused"), ("ec", "fused")],
)
@pytest.mark.parametrize(
    "optimizer", ["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"]
)
def test_training_equals_plain_torch(
    gpu_cluster: Cluster, optimizer: str, kind: str, kernel: str
) -> None:
    case = Case(
        (
            Table("a", 50, dim=8, pooling="mean" if kind == "ebc" else "sum", kernel=kernel),
            Table("b", 33, dim=8 if kind == "ec" else 16, kernel=kernel),
            Table("c", 20, dim=8, kernel=kernel),
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        kind="ec" if kind == "ec" else "ebc",
        weighted=kind == "weighted",
        optimizer=optimizer,
        learning_rate=0.05,
        integers=False,
        device="cuda",
        settings=(("beta1", BETA1), ("beta2", BETA2), ("weight_decay", DECAY)),
    )
    for compared in gpu_cluster.run(compare, case):
        assert len(compared) == 2 * len(case.tables), compared
