"""Codecs for the gradients of rows that several ranks have: fewer bytes, equal replicas, and
nothing lost for good."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.exchange.replication import Replication
from tests.case import Case, Table, initial_weight, prefix, sharded
from tests.cluster import Cluster
from tests.hot.replicas import hot_rows, replica_bits, same_on_all_ranks
from tests.parity import local_parts, train_step, whole
from tests.reference import unsharded_run

DCT = fr.CodecOptions(type="dct", density=0.1)
CODECS = [
    DCT,
    fr.CodecOptions(type="dct", density=0.3, values="bf16", every=2),
    fr.CodecOptions(type="int8"),
    fr.CodecOptions(type="bf16"),
]
TABLES = (
    Table("a", 50, dim=16, hot=tuple(range(0, 50, 2))),
    Table("b", 30, dim=8, hot=tuple(range(30))),
    Table("c", 20, dim=16),
)


def hot_case(codec: fr.CodecOptions | None, **changes: Any) -> Case:
    settings: dict[str, Any] = {"integers": False, "steps": 6, **changes}
    options = fr.HotOptions(codec=codec, sync_every=settings.pop("sync_every", 1))
    return Case(TABLES, (9, 7), hot_options=options, **settings)


def left_of(model: Any) -> dict[str, torch.Tensor]:
    """What all ranks have left, by table, in the rows of the table."""
    hot = hot_rows(model)
    found = {}
    for table in TABLES:
        left = torch.zeros(table.rows, table.dim)
        state = hot.state()
        if f"{table.name}.ids" in state:
            left[state[f"{table.name}.ids"]] = state[f"{table.name}.left"]
        dist.all_reduce(left)
        found[table.name] = left
    return found


def nothing_is_lost(case: Case) -> None:
    """What the rows have learned and what is left make up all gradients, with SGD."""
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    for step in range(case.steps):
        train_step(case, model, step)
        options = case.hot_options
        if options is not None and (step + 1) % options.sync_every == 0:
            same_on_all_ranks(replica_bits(model))
    fr.reconcile(model)
    state, left = model.state_dict(), left_of(model)
    for i, table in enumerate(case.tables):
        weight = whole(state[f"sparse.{prefix(case)}.{table.name}.weight"], initial_weight(case, i))
        wanted = run.weights[table.name] + case.learning_rate * left[table.name]
        assert torch.allclose(weight, wanted, atol=2e-4), table.name
        if table.hot is not None:
            assert left[table.name].any()


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.type} {c.density or ''}")
@pytest.mark.parametrize("sync_every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_does_not_travel_is_added_later(
    cluster_2: Cluster, codec: fr.CodecOptions, sync_every: int
) -> None:
    cluster_2.run(nothing_is_lost, hot_case(codec, sync_every=sync_every))


def bytes_of_sync(case: Case) -> int:
    model = sharded(case)
    train_step(case, model, 0)
    with CollectiveCounter() as counter:
        train_step(case, model, 1)
    # The third all-to-all brings gradients to owners; the fourth hot ones to everybody.
    assert len(counter.collectives) == 4
    return max(c.bytes_sent for c in counter.collectives if c.dtype == torch.int32)


def test_fewer_bytes(cluster_2: Cluster) -> None:
    tables = (Table("a", 300, dim=64, hot=tuple(range(0, 300, 2))),)
    plain, coded = (
        cluster_2.run(
            bytes_of_sync,
            Case(tables, (200, 200), hot_options=fr.HotOptions(codec=codec), integers=False),
        )
        for codec in (None, fr.CodecOptions(type="dct", density=0.05, values="bf16"))
    )
    for one, other in zip(plain, coded, strict=True):
        assert one > 12 * other  # four bytes of a place, one of a count, and 3.4 entries of three


def nothing_left(replication: Replication) -> bool:
    """Whether codecs have sent all that they were given."""
    left = [value for name, value in replication.state().items() if name.endswith("left")]
    assert left, "the state has nothing that is left"
    return not any(value.any() for value in left)


def go_on(case: Case) -> None:
    """A state that is loaded goes on to the last bit; of other ranks, nothing is lost."""
    model, other = sharded(case), sharded(case)
    for step in range(3):
        train_step(case, model, step)
        train_step(case, other, step)
    hot, into = hot_rows(model), hot_rows(other)
    saved = {name: value.clone() for name, value in hot.state().items()}
    assert saved
    into.load([], own=True)
    assert nothing_left(into)
    into.load([saved], own=True)
    for step in range(3, 6):
        train_step(case, model, step)
        train_step(case, other, step)
    for one, two in zip(replica_bits(model), replica_bits(other), strict=True):
        assert torch.equal(one, two)
    before = left_of(model)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, hot.state())
    nobody = {n: torch.zeros_like(v) if n.endswith("left") else v for n, v in states[0].items()}
    into.load([*states, nobody], own=False)  # of three ranks, the last of which has nothing left
    for name, left in left_of(other).items():
        assert torch.allclose(left, before[name], atol=1e-6)
    into.load([states[0]], own=False)  # of the one rank of a training
    for name, left in left_of(other).items():
        wanted = torch.zeros_like(left)
        if f"{name}.ids" in states[0]:
            wanted[states[0][f"{name}.ids"]] = states[0][f"{name}.left"]
        assert torch.allclose(left, wanted, atol=1e-6)


def test_states_are_taken_over(cluster_2: Cluster) -> None:
    cluster_2.run(go_on, hot_case(DCT))


# ---------------------------------------------------------------- groups


def grid_case(codec: fr.CodecOptions | None) -> Case:
    tables = tuple(dataclasses.replace(t, hot=None) for t in TABLES)
    grid = fr.GridOptions(sharding_group_size=2, sync="gradients", codec=codec)
    return Case(tables, (6, 3, 4, 5), grid=grid, integers=False, steps=5)


def groups_lose_nothing(case: Case) -> None:
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    for step in range(case.steps):
        train_step(case, model, step)
        model.sync()
    fused = model.module.sparse.fused
    (shared,) = [each for each in fused.replications if each.name == "grid"]
    left = shared.state()
    assert any(value.any() for name, value in left.items() if name.endswith("left"))
    rank, world = dist.get_rank(), dist.get_world_size()
    state = model.state_dict()
    for k, bucket in enumerate(fused.layout.buckets):
        rows = left[f"{k}.left"]
        everywhere = [torch.empty_like(rows) for _ in range(world)]
        dist.all_gather(everywhere, rows)
        # Replicas of a shard are next to each other.
        summed = everywhere[rank // 2 * 2] + everywhere[rank // 2 * 2 + 1]
        at = 0
        for t in range(bucket.first_table, bucket.end_table):
            table = fused.layout.tables[t]
            value = state[f"sparse.{prefix(case)}.{table.name}.weight"]
            for where, part in local_parts(value):
                count = part.size(0)
                wanted = run.weights[table.name][where]
                wanted = wanted + case.learning_rate * summed[at : at + count]
                assert torch.allclose(part, wanted, atol=2e-4), table.name
                at += count


def groups_go_on(case: Case) -> None:
    model, other = sharded(case), sharded(case)
    shared, into = (next(iter(m.module.sparse.fused.replications)) for m in (model, other))
    for step in range(3):
        train_step(case, model, step)
        train_step(case, other, step)
    saved = {name: value.clone() for name, value in shared.state().items()}
    into.load([], own=True)
    assert nothing_left(into)
    into.load([saved], own=True)
    for step in range(3, 5):
        train_step(case, model, step)
        train_step(case, other, step)
    for name, value in shared.state().items():
        assert torch.equal(value, into.state()[name]), name
    into.load([saved, saved], own=False)  # of other shards, perhaps
    assert nothing_left(into)


def test_states_of_groups_are_taken_over(clusters: Callable[[int], Cluster]) -> None:
    clusters(4).run(groups_go_on, grid_case(DCT))


@pytest.mark.parametrize(
    "codec",
    [CODECS[1], *(pytest.param(c, marks=pytest.mark.slow) for c in (CODECS[0], CODECS[2]))],
    ids=lambda c: f"{c.type} {c.density or ''}",
)
def test_gradients_between_groups(
    clusters: Callable[[int], Cluster], codec: fr.CodecOptions
) -> None:
    clusters(4).run(groups_lose_nothing, grid_case(codec))


# ---------------------------------------------------------------- what is refused


def error_of(case: Case) -> str:
    try:
        sharded(case)
    except ValueError as error:
        return str(error)
    return ""


def test_what_does_not_go_with_codecs_is_refused(cluster_2: Cluster) -> None:
    with pytest.raises(ValueError, match="codec is dct with adapt, must be without"):
        fr.HotOptions(codec=DCT, adapt=fr.AdaptOptions())
    with pytest.raises(ValueError, match="codec is dct with sync 'weights', must be with sync"):
        fr.GridOptions(sharding_group_size=2, codec=DCT)
    clipped = hot_case(DCT, settings=(("gradient_clipping", True), ("max_gradient", 1.0)))
    for text in cluster_2.run(error_of, clipped):
        assert "codec is dct and the optimizer clips gradients" in text
