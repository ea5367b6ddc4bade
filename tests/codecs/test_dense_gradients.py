"""Thresholds of data-parallel gradients, on real ranks in real DistributedDataParallel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedrec_torchrec as fr
from fusedrec_torchrec.codecs.dense_gradients import GradientThresholds, thresholds_of
from fusedrec_torchrec.codecs.threshold import Threshold, quantile
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import Case, Table
from tests.cluster import Cluster

SHAPES = ((40, 30), (7,), (30, 30), (1000,), (3, 3))


class Linear(nn.Module):
    """The gradient of each parameter is what the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, wanted: list[torch.Tensor]) -> torch.Tensor:
        products = [
            (weight * each).sum() for weight, each in zip(self.weights, wanted, strict=True)
        ]
        return torch.stack(products).sum()


def gradients_of(step: int, rank: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    scales = (1.0, 1.0, 1e-4, 10.0, 1.0)  # of each parameter
    return [
        torch.randn(shape, generator=g) * scale for shape, scale in zip(SHAPES, scales, strict=True)
    ]


def hooked(options: fr.ThresholdOptions) -> tuple[DistributedDataParallel, GradientThresholds]:
    ddp = DistributedDataParallel(Linear(), gradient_as_bucket_view=True, static_graph=True)
    thresholds = GradientThresholds(options, ddp.module, ddp.process_group)
    thresholds.register(ddp)
    assert thresholds_of(nn.ModuleList([ddp])) is thresholds
    return ddp, thresholds


def step_of(ddp: DistributedDataParallel, step: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(gradients_of(step, dist.get_rank())).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def nothing_is_lost(values: Any, density: float) -> None:
    """Checks that what ranks have applied and their residuals make up all gradients."""
    world = dist.get_world_size()
    ddp, thresholds = hooked(fr.ThresholdOptions(density=density, values=values, every=3))
    applied = [torch.zeros(shape) for shape in SHAPES]
    total = [torch.zeros(shape) for shape in SHAPES]
    for step in range(6):
        for sums, each in zip(applied, step_of(ddp, step), strict=True):
            sums += each
        for rank in range(world):
            for sums, each in zip(total, gradients_of(step, rank), strict=True):
                sums += each / world
        sent = [int((each != 0).sum()) for each in step_of(ddp, 10**6 + step)]
        thresholds.undo()  # that step has not been
        assert sum(n for n, s in zip(sent, SHAPES, strict=True) if torch.Size(s).numel() >= 256) > 0
        large = sum(torch.Size(s).numel() for s in SHAPES if torch.Size(s).numel() >= 256)
        most = world * (density * large * 17 / 16 + 1)
        assert sum(sent) - 7 - 9 <= most
    left = thresholds.state()
    for i, (sums, wanted) in enumerate(zip(applied, total, strict=True)):
        rest = left.get(f"weights.{i}.left")
        assert (rest is None) == (wanted.numel() < 256)
        rest = torch.zeros_like(wanted) if rest is None else rest.view_as(wanted).clone()
        dist.all_reduce(rest)
        scale = wanted.abs().max()
        assert torch.allclose(sums + rest / world, wanted, atol=float(1e-5 * scale), rtol=1e-5)
        if wanted.numel() >= 256:
            assert rest.any() and sums.any()  # some of it has travelled, of each parameter


@pytest.mark.parametrize(("values", "density"), [("fp32", 0.05), ("bf16", 0.3), ("fp16", 0.01)])
def test_what_does_not_travel_is_left(cluster_2: Cluster, values: str, density: float) -> None:
    cluster_2.run(nothing_is_lost, values, density)


def small_ones_are_exact() -> None:
    ddp, _ = hooked(fr.ThresholdOptions(density=0.01))
    for step in range(3):
        found = step_of(ddp, step)
        for i in (1, 4):
            first, second = (gradients_of(step, r)[i] / 2 for r in range(2))
            assert torch.equal(found[i], first + second)


def test_small_parameters_travel_whole(cluster_2: Cluster) -> None:
    cluster_2.run(small_ones_are_exact)


def all_of_it() -> None:
    plain = DistributedDataParallel(Linear(), gradient_as_bucket_view=True, static_graph=True)
    ddp, thresholds = hooked(fr.ThresholdOptions(density=1.0))
    for step in range(3):
        for one, other in zip(step_of(ddp, step), step_of(plain, step), strict=True):
            assert torch.equal(one, other)
    assert thresholds.state() == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_entries_are_what_ddp_does(clusters: Any, ranks: int) -> None:
    clusters(ranks).run(all_of_it)


def bytes_of_a_step(density: float) -> list[tuple[str, int]]:
    ddp, _ = hooked(fr.ThresholdOptions(density=density))
    step_of(ddp, 0)
    with CollectiveCounter() as counter:
        step_of(ddp, 1)
    return [(c.name, c.bytes_sent) for c in counter.collectives]


def test_one_collective_of_the_bytes_that_are_promised(cluster_2: Cluster) -> None:
    large = 1200 + 900 + 1000
    room = int(0.02 * large * 17 / 16) + 1
    # Two bytes for a value, two for its place, two for the number of entries, and small ones.
    wanted = [("all_gather", room * 4 + 2 + 4 * 16)]
    assert cluster_2.run(bytes_of_a_step, 0.02) == [wanted, wanted]


def numbers_that_are_none() -> None:
    ddp, thresholds = hooked(fr.ThresholdOptions(density=0.05))
    step_of(ddp, 0)
    ddp.zero_grad()
    bad = gradients_of(1, dist.get_rank())
    if dist.get_rank() == 1:
        bad[2].fill_(float("nan"))
    ddp(bad).backward()
    assert any(not torch.isfinite(p.grad).all() for p in ddp.parameters() if p.grad is not None)
    for name, value in thresholds.state().items():
        assert not name.endswith("left") or torch.isfinite(value).all()
    thresholds.undo()
    found = step_of(ddp, 2)
    assert all(torch.isfinite(each).all() for each in found)


def test_numbers_that_are_none_are_seen_but_not_kept(cluster_2: Cluster) -> None:
    cluster_2.run(numbers_that_are_none)


def as_if_it_had_not_been() -> None:
    (one, first), (other, second) = (hooked(fr.ThresholdOptions(density=0.05)) for _ in range(2))
    for step in range(8):
        step_of(one, step)
        if step == 4:
            continue
        step_of(other, step)
        if step == 3:
            step_of(one, 4)
            first.undo()
    # ``one`` saw step 4 twice: undone, and then again; ``other`` not at all.
    assert any(
        not torch.equal(value, second.state()[name]) for name, value in first.state().items()
    )
    (third_ddp, third), (fourth_ddp, fourth) = (
        hooked(fr.ThresholdOptions(density=0.05)) for _ in range(2)
    )
    for step in range(8):
        if step == 4:
            step_of(third_ddp, step)
            third.undo()
        else:
            got, want = step_of(third_ddp, step), step_of(fourth_ddp, step)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for name, value in third.state().items():
        assert torch.equal(value, fourth.state()[name])


def test_a_step_can_be_undone(cluster_2: Cluster) -> None:
    cluster_2.run(as_if_it_had_not_been)


def descend(feedback: bool) -> float:
    """Returns how far from the least value of a convex function some steps end.

    Ranks pull half of the entries hard, in opposite directions: that is nothing in the mean, but
    these entries are the largest of every gradient.
    """
    torch.manual_seed(0)
    target = torch.randn(40, 30)
    pull = torch.zeros(40, 30)
    pull[:20] = 3.0 if dist.get_rank() == 0 else -3.0
    options = fr.ThresholdOptions(density=0.1, error_feedback=feedback)
    ddp, _ = hooked(options)
    weight = next(iter(ddp.parameters()))
    optimizer = torch.optim.SGD([weight], lr=0.02)
    for _ in range(600):
        ddp.zero_grad()
        loss = 0.5 * ((weight - target) ** 2).sum() + (pull * weight).sum()
        (loss + 0 * ddp([torch.zeros(s) for s in SHAPES])).backward()
        optimizer.step()
    return float(0.5 * ((weight.detach() - target) ** 2).sum())


def test_error_feedback_converges_better(cluster_2: Cluster) -> None:
    (with_it, _), (without, _) = (cluster_2.run(descend, f) for f in (True, False))
    assert with_it < 0.1 * without


def wrapped_model() -> tuple[bool, bool]:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from tests.case import Wrapper, unsharded

    case = Case((Table("a", 60),), (5, 6))
    module = unsharded(case)
    sharders = fr.fused_sharders()
    plan = construct_module_sharding_plan(
        module, {"a": fr.fused_row_wise()}, sharder=sharders[0], local_size=2, world_size=2,
        device_type="cpu",
    )  # fmt: skip
    dense = Wrapper(module)
    dense.over = nn.Linear(64, 64)
    group = dist.group.WORLD
    assert group is not None
    model = DistributedModelParallel(
        dense,
        env=ShardingEnv.from_process_group(group),
        plan=ShardingPlan({"sparse": plan}),
        sharders=sharders,
        device=torch.device("cpu"),
        data_parallel_wrapper=fr.ThresholdedDataParallel(),
    )  # fmt: skip
    return thresholds_of(model) is not None, thresholds_of(dense) is None


def renewals() -> tuple[list[float], list[float]]:
    """Returns thresholds when gradients suddenly grow, and when they fall."""
    found = []
    for factor in (100.0, 0.001):
        ddp, thresholds = hooked(fr.ThresholdOptions(density=0.05, every=1000))
        taus = []
        for step in range(6):
            ddp.zero_grad()
            scale = factor if step >= 3 else 1.0
            ddp([g * scale for g in gradients_of(step, dist.get_rank())]).backward()
            taus.append(float(thresholds.state()["weights.0.threshold"][0]))
        found.append(taus)
    return found[0], found[1]


def test_thresholds_follow_gradients(cluster_2: Cluster) -> None:
    """Thresholds are renewed long before it is time, if they do not fit."""
    for grown, fallen in cluster_2.run(renewals):
        assert grown[5] > 10 * grown[2]
        # What is left of earlier gradients is still there.
        assert fallen[5] < fallen[2]


def names_that_mean_something() -> None:
    """Loads the state of parameters that are called like components of the state."""
    module = nn.ModuleDict({"inner": nn.ParameterDict({"left": nn.Parameter(torch.zeros(400))})})
    nobody: Any = None
    thresholds = GradientThresholds(fr.ThresholdOptions(density=0.05), module, nobody)
    tau = torch.tensor([1.0, 2.0]).double()
    state = {"inner.left.threshold": tau, "inner.left.left": torch.ones(400)}
    thresholds.load([state])
    assert thresholds.state().keys() == state.keys()


def test_names_of_parameters_do_not_matter() -> None:
    names_that_mean_something()


def test_a_wrapper_for_distributed_model_parallel(cluster_2: Cluster) -> None:
    assert cluster_2.run(wrapped_model) == [(True, True)] * 2
    with pytest.raises(ValueError, match="allreduce_comm_precision is 'fp16', must be left out"):
        fr.ThresholdedDataParallel(allreduce_comm_precision="fp16")
    with pytest.raises(ValueError, match="find_unused_parameters is True, must be False"):
        fr.ThresholdedDataParallel(find_unused_parameters=True)


def go_on_elsewhere() -> None:
    ddp, thresholds = hooked(fr.ThresholdOptions(density=0.05))
    for step in range(4):
        step_of(ddp, step)
    saved = {name: value.clone() for name, value in thresholds.state().items()}
    other_ddp, other = hooked(fr.ThresholdOptions(density=0.05))
    step_of(other_ddp, 77)
    other.load([saved])
    for step in range(4, 7):
        got, want = step_of(other_ddp, step), step_of(ddp, step)
        # The first two steps of DDP have other buckets: the same entries, in another order.
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, saved)
    other.load([*states, *states])  # of four ranks
    for name, value in other.state().items():
        if name.endswith("left"):
            mean = (states[0][name] + states[1][name]) / 2
            assert torch.allclose(value, mean)


def test_what_is_left_goes_on_with_a_checkpoint(cluster_2: Cluster) -> None:
    cluster_2.run(go_on_elsewhere)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"density": 0.0}, "is 0.0: it should be greater than 0 and less than or equal to 1"),
        ({"density": 1.1}, "density is 1.1: it should be less than or equal to 1 and greater"),
        ({"every": 0}, "every is 0: it should be greater than or equal to 1"),
        ({"values": "int8"}, "values is 'int8': it should be 'fp32', 'fp16' or 'bf16'"),
        ({"min_elements": -1}, "min_elements is -1: it should be greater than or equal to 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fr.ThresholdOptions(**given)


@pytest.mark.parametrize("dim", [16, 20, 64])
def test_a_sample_has_all_columns_alike(dim: int) -> None:
    """Also where rows are as many as the sample has numbers."""
    for rows in (1 << 16, 3 << 15, 100_003):
        numbers = torch.rand(rows, dim, generator=torch.Generator().manual_seed(0))
        numbers[:, :4] += 10
        share = float((numbers >= quantile(numbers, 0.5)).float().mean())
        assert share == pytest.approx(0.5, abs=0.01), (rows, dim)


def test_a_quantile_of_a_sample() -> None:
    numbers = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    for density in (0.5, 0.05, 0.01):
        share = float((numbers.abs() >= quantile(numbers, density)).float().mean())
        assert share == pytest.approx(density, rel=0.1)
    few = torch.arange(1.0, 11.0)
    assert int((few >= quantile(few, 0.3)).sum()) == 3
    assert float(quantile(few, 1.0)) == 1.0


def test_thresholds_of_nothing_and_states() -> None:
    threshold = Threshold(0.5, 10)
    assert float(threshold(torch.empty(0))) == 0 and threshold.tau is None
    threshold(torch.tensor([1.0, -3.0]))
    other = Threshold(0.5, 10)
    other.load([threshold.state(), threshold.state()])
    assert torch.equal(other.state(), threshold.state())
    other.load([])
    assert other.tau is None
