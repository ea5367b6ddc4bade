"""Rows that travel: bags that repeat are pooled once, by whoever asked for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.exchange import requested_rows
from fusedrec_torchrec.exchange.bags import distinct_bags
from fusedrec_torchrec.exchange.distinct_bags import BagDedup
from tests.case import (
    Case,
    Wrapper,
    batch,
    initial_weight,
    local_device,
    prefix,
    sharded,
    unsharded,
)
from tests.cluster import Cluster
from tests.parity import run_and_check
from tests.sharding.modules.test_owner_pooling import MIX, SHARED_FEATURES, SUMS, only


def by_requesters_alternately(case: Case) -> None:
    """Every other slot looks for equal bags, and the others do not: also slots of one table."""
    find: Any = BagDedup.__call__

    def alternately(self: BagDedup, *args: Any) -> Any:
        *others, looks = args
        return find(self, *others, [look and s % 2 == 0 for s, look in enumerate(looks)])

    def alternate(_: BagDedup, *args: Any) -> list[bool]:
        return [s % 2 == 0 for s in range(len(args[-1]))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BagDedup, "__call__", alternately)  # of owners
        patch.setattr(BagDedup, "repeating", alternate)  # of requesters
        patch.setattr(requested_rows, "SAVED", 0.0)
        run_and_check(case)


LOOKING = {
    "row wise": only("fused_row_wise", SHARED_FEATURES),
    "mix": SHARED_FEATURES,
    "one type each": MIX,
}


@pytest.mark.parametrize("tables", LOOKING)
@pytest.mark.parametrize("vbe", [False, True])
def test_slots_that_do_not_look_beside_slots_that_do(
    cluster_2: Cluster, tables: str, vbe: bool
) -> None:
    case = Case(
        tables=LOOKING[tables],
        batch_sizes=(8, 6),
        lengths=(2, 4, 8),
        repeated=True,
        vbe=vbe,
        optimizer="adagrad",
    )
    cluster_2.run(by_requesters_alternately, case)


def pools_distinct_bags(case: Case) -> None:
    """Parity, with fewer bags pooled than there are."""
    seen = []

    def noting(*args: Any) -> Any:
        bags = distinct_bags(*args)
        seen.append((bags.num_bags, bags.output.num_bags))
        return bags

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requested_rows, "distinct_bags", noting)
        run_and_check(case)
    assert 0 < sum(pooled for pooled, _ in seen) <= 0.75 * sum(shown for _, shown in seen)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weighted": True, "tables": only("fused_row_wise", SUMS)},
        {"vbe": True},
        {"integers": False, "optimizer": "rowwise_adagrad", "input_dist": "exact_counts"},
        {"output_dtype": "fp16"},
        {"id_dtype": "int32", "length_dtype": "int64"},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_requesters_pool_each_distinct_bag_once(
    cluster_2: Cluster, settings: dict[str, Any]
) -> None:
    given = {"tables": only("fused_row_wise"), "lengths": (2, 4, 8)} | settings
    cluster_2.run(pools_distinct_bags, Case(batch_sizes=(16, 12), repeated=True, **given))


def gradients_of_weights(case: Case, extra: bool) -> None:
    """Bags that are equal but for whose weights they carry are not one."""
    rank = dist.get_rank()
    found = []
    options = fr.ExchangeOptions(extra_features="ignore")
    reference = unsharded_with_weights(case)
    for module in (sharded(case, options), reference):
        given = batch(case, 0, rank)
        if module is not reference:
            given = given.to(local_device(case))
        weights = given.weights().clone().requires_grad_()
        features = KeyedJaggedTensor(
            given.keys(), given.values(), weights=weights, lengths=given.lengths()
        )
        if extra:  # a feature of no table, before the others
            stride, device = given.stride(), given.values().device
            ids, ones = torch.arange(stride, device=device), torch.ones(stride, device=device)
            features = KeyedJaggedTensor(
                ["unknown", *given.keys()],
                torch.cat([ids, given.values()]),
                weights=torch.cat([ids.float(), weights]),
                lengths=torch.cat([ones.int(), given.lengths()]),
            )
        outputs = module(features)
        torch.stack([(out * out).sum() for out in outputs.values()]).sum().backward()
        assert weights.grad is not None
        found.append(weights.grad.cpu())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert float(found[0].abs().min()) > 0


def unsharded_with_weights(case: Case) -> torch.nn.Module:
    module = unsharded(case, "cpu")
    parameters = dict(module.named_parameters())
    for i, t in enumerate(case.tables):
        parameters[f"{prefix(case)}.{t.name}.weight"].data.copy_(initial_weight(case, i))
    return Wrapper(module)


WEIGHTED = {
    "one table per feature": SUMS,
    "tables that share features": tuple(replace(t, pooling="sum") for t in SHARED_FEATURES),
}


@pytest.mark.parametrize("tables", WEIGHTED)
@pytest.mark.parametrize("extra", [False, True])
def test_weights_of_equal_bags_get_their_own_gradients(
    cluster_2: Cluster, tables: str, extra: bool
) -> None:
    case = Case(
        tables=only("fused_row_wise", WEIGHTED[tables]),
        batch_sizes=(16, 12),
        lengths=(2, 4, 8),
        weighted=True,
        repeated=True,
        integers=False,
    )
    cluster_2.run(gradients_of_weights, case, extra)
