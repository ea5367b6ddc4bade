"""Ranks that were given different plans or settings hear of it before they train."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.core import native
from tests.cluster import Cluster

CPU = torch.device("cpu")
ROWS = {"a": 40, "b": 20}


def sharded(
    *,
    order: tuple[str, ...] = ("a", "b"),
    dim: int = 8,
    plan: dict[str, dict[str, Any]] | None = None,
    stock: tuple[str, ...] = (),
    pooled: dict[str, Any] | None = None,
    optimizer: tuple[Any, dict[str, Any]] | None = None,
    frozen: tuple[str, ...] = (),
    weighted: bool = False,
    gradient_division: bool = True,
    **sharders: Any,
) -> DistributedModelParallel:
    """Two tables on the ranks of the default group."""
    bags = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS[name], embedding_dim=dim, feature_names=[f"f_{name}"]
            )
            for name in order
        ],
        is_weighted=weighted,
        device=torch.device("meta"),
    )
    for name in frozen:
        bags.embedding_bags[name].weight.requires_grad_(False)
    if optimizer is not None:
        _apply_optimizer_in_backward(optimizer[0], bags.parameters(), optimizer[1])
    entries = {name: fr.fused_row_wise(**(plan or {}).get(name, {})) for name in order}
    entries |= {name: table_wise(rank=0) for name in stock}
    for name, owners in (pooled or {}).items():
        whole = isinstance(owners, int)
        entries[name] = fr.fused_table_wise(owners) if whole else fr.fused_column_wise(owners)
    ours = fr.fused_sharders(**sharders)
    by_table = construct_module_sharding_plan(bags, entries, sharder=ours[0], device_type="cpu")
    set_gradient_division(gradient_division)
    try:
        return DistributedModelParallel(
            bags, plan=ShardingPlan({"": by_table}), sharders=ours, device=CPU
        )
    finally:
        set_gradient_division(True)


def errors_then_a_good_step(
    differing_rank: int, everywhere: dict[str, Any], there: dict[str, Any]
) -> str:
    """The error on this rank if one rank was given something else; training works afterwards."""
    given = everywhere | (there if dist.get_rank() == differing_rank else {})
    try:
        sharded(**given)
    except ValueError as error:
        text = str(error)
    else:
        text = "no error"
    model = sharded()
    batch = KeyedJaggedTensor(
        ["f_a", "f_b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 1, 1])
    )
    model(batch).values().sum().backward()
    return text


@pytest.mark.parametrize(
    ("everywhere", "there", "named"),
    [
        pytest.param(
            {},
            {"plan": {"a": {"rows_per_rank": [30, 10]}}},
            "plan of table 'a'.rows_per_rank is [20, 20] on rank 0 and [30, 10] on rank 1",
            id="rows_per_rank",
        ),
        pytest.param(
            {},
            {"stock": ("a",)},
            "plan of table 'a'.sharding_type is 'fused_row_wise' on rank 0 and 'table_wise' on "
            "rank 1",
            id="sharding type",
        ),
        pytest.param(
            {"pooled": {"a": 0}},
            {"pooled": {"a": 1}},
            "plan of table 'a'.ranks is [0] on rank 0 and [1] on rank 1",
            id="owner",
        ),
        pytest.param(
            {"pooled": {"a": [0, 1]}},
            {"pooled": {"a": [1, 0]}},
            "plan of table 'a'.ranks is [0, 1] on rank 0 and [1, 0] on rank 1",
            id="order of owners",
        ),
        pytest.param(
            {"pooled": {"a": [0]}},
            {"pooled": {"a": 0}},
            "plan of table 'a'.sharding_type is 'fused_column_wise' on rank 0 and "
            "'fused_table_wise' on rank 1",
            id="fused sharding type",
        ),
        pytest.param(
            {},
            {"options": fr.ExchangeOptions(hash_ids=True)},
            "options.hash_ids is [] on rank 0 and ['a', 'b'] on rank 1",
            id="hash_ids",
        ),
        pytest.param(
            {"plan": {"a": {"hot_rows": [1, 2]}}},
            {"plan": {"a": {"hot_rows": [1, 3]}}},
            "plan of table 'a'.hot_rows.ids is [1, 2] on rank 0 and [1, 3] on rank 1",
            id="other hot ids",
        ),
        pytest.param(
            {"plan": {"a": {"hot_rows": [1, 2]}}},
            {"plan": {"a": {"hot_rows": [1, 2, 3]}}},
            "plan of table 'a'.hot_rows.ids is [1, 2] on rank 0 and [1, 2, 3] on rank 1",
            id="another number of hot ids",
        ),
        pytest.param(
            {"plan": {"a": {"hot_rows": [1, 2]}}},
            {"hot": fr.HotOptions(sync_every=2)},
            "hot.sync_every is 1 on rank 0 and 2 on rank 1",
            id="hot options",
        ),
        pytest.param(
            {"plan": {"a": {"hot_rows": list(range(20))}}},
            {"plan": {"a": {"hot_rows": [*range(19), 30]}}},
            "plan of table 'a'.hot_rows.ids is [0, 1, 2, ",
            id="many hot ids",
        ),
        pytest.param(
            {"plan": {"a": {"rows_per_rank": [20, 20]}}},
            {"plan": {"a": {"rows_per_rank": list(np.array([30, 10]))}}},
            "plan of table 'a'.rows_per_rank is [20, 20] on rank 0 and [30, 10] on rank 1",
            id="numbers of numpy",
        ),
        pytest.param(
            {"fused_params": {"learning_rate": 0.5}},
            {"fused_params": {"learning_rate": np.float32(0.25)}},
            "fused_params.learning_rate is 0.5 on rank 0 and 0.25 on rank 1",
            id="one number of numpy",
        ),
        pytest.param(
            {},
            {"frozen": ("b",)},
            "embedding_bags.b.weight.requires_grad is True on rank 0 and False on rank 1",
            id="requires_grad",
        ),
        pytest.param(
            {}, {"weighted": True}, "weighted is False on rank 0 and True on rank 1", id="weighted"
        ),
        pytest.param(
            {},
            {"gradient_division": False},
            "gradient division is True on rank 0 and False on rank 1",
            id="gradient division",
        ),
        pytest.param(
            {},
            {"order": ("b", "a")},
            "order of tables is a, b on rank 0 and b, a on rank 1",
            id="order of tables",
        ),
        pytest.param(
            {},
            {"dim": 16},
            "table 'a'.embedding_dim is 8 on rank 0 and 16 on rank 1",
            id="dimension",
        ),
        pytest.param(
            {},
            {"plan": {"b": {"codecs": fr.Codecs(forward=fr.CodecOptions(type="bf16"))}}},
            "plan of table 'b'.codecs.forward.type is not given on rank 0 and 'bf16' on rank 1",
            id="codecs",
        ),
        pytest.param(
            {"fused_params": {"learning_rate": 0.1}},
            {"fused_params": {"learning_rate": 0.2}},
            "fused_params.learning_rate is 0.1 on rank 0 and 0.2 on rank 1",
            id="optimizer settings",
        ),
        pytest.param(
            {"optimizer": (torch.optim.SGD, {"lr": 0.1})},
            {"optimizer": (torch.optim.SGD, {"lr": 0.2})},
            "optimizer of embedding_bags.a.weight.lr is 0.1 on rank 0 and 0.2 on rank 1",
            id="optimizer in backward",
        ),
    ],
)  # fmt: skip
def test_all_ranks_name_what_one_was_given_differently(
    cluster_2: Cluster, everywhere: dict[str, Any], there: dict[str, Any], named: str
) -> None:
    errors = cluster_2.run(errors_then_a_good_step, 1, everywhere, there)
    assert errors[0] == errors[1]
    assert named in errors[0]
    assert errors[0].startswith("ranks do not agree about the model: ")
    assert "All ranks must be given the same model, plan, options" in errors[0]


@pytest.mark.parametrize(
    ("everywhere", "there"),
    [
        ({"fused_params": {"eps": 1}}, {"fused_params": {"eps": 1.0}}),
        ({"fused_params": {"eps": 0.5}}, {"fused_params": {"eps": np.float32(0.5)}}),
        (
            {"options": fr.ExchangeOptions(hash_ids=True)},
            {"options": fr.ExchangeOptions(hash_ids=["b", "a"])},
        ),
        ({"plan": {"a": {}}}, {"plan": {"a": {"rows_per_rank": (20, 20)}}}),
    ],
    ids=["whole numbers", "numpy", "names of tables", "the default"],
)
def test_the_same_in_other_words_is_the_same(
    cluster_2: Cluster, everywhere: dict[str, Any], there: dict[str, Any]
) -> None:
    assert cluster_2.run(errors_then_a_good_step, 1, everywhere, there) == ["no error"] * 2


def test_the_rank_that_differs_is_named_among_four(cluster_4: Cluster) -> None:
    errors = cluster_4.run(
        errors_then_a_good_step, 2, {}, {"options": fr.ExchangeOptions(hash_seed=7)}
    )
    assert len(set(errors)) == 1
    assert "options.hash_seed is 0 on ranks 0, 1, 3 and 7 on rank 2" in errors[0]


def error_with_own_hot_set(folder: str, ids_of_rank: list[list[int] | None]) -> str:
    """Every rank has a file of its own; None: it has none."""
    rank = dist.get_rank()
    path = Path(folder) / f"rank_{rank}" / "hot_set.npz"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    ids = ids_of_rank[rank]
    if ids is not None:
        HotSet(ROWS, {"a": np.array(ids)}).save(path)
    try:
        sharded(hot=fr.HotOptions(hot_set=path))
    except (ValueError, OSError) as error:
        return str(error)
    return "no error"


def test_hot_sets_of_files_count_by_what_is_in_them(cluster_2: Cluster, tmp_path: Path) -> None:
    run: Callable[..., list[str]] = partial(cluster_2.run, error_with_own_hot_set, str(tmp_path))
    assert run([[1, 2], [1, 2]]) == ["no error", "no error"]
    errors = run([[1, 2], [1, 3]])
    assert errors[0] == errors[1]
    assert "hot rows of table 'a' is [1, 2] on rank 0 and [1, 3] on rank 1" in errors[0]


def test_a_hot_set_that_one_machine_lacks_is_an_error_on_all(
    cluster_2: Cluster, tmp_path: Path
) -> None:
    errors = cluster_2.run(error_with_own_hot_set, str(tmp_path), [[1, 2], None])
    missing = tmp_path / "rank_1" / "hot_set.npz"
    assert errors == [f"on rank 1: hot set {missing} does not exist"] * 2


def test_a_hot_set_that_nobody_has_is_an_error_of_all(cluster_2: Cluster, tmp_path: Path) -> None:
    errors = cluster_2.run(error_with_own_hot_set, str(tmp_path), [None, None])
    missing = tmp_path / "rank_0" / "hot_set.npz"
    assert errors == [f"on rank 0 (rank 1, too): hot set {missing} does not exist"] * 2


def error_with_unreadable_hot_set(folder: str) -> str:
    """Rank 1 finds something else in the file."""
    path = Path(folder) / f"rank_{dist.get_rank()}.npz"
    HotSet(ROWS, {"a": np.array([1, 2])}).save(path)
    if dist.get_rank() == 1:
        path.write_bytes(b"not a hot set")
    try:
        sharded(hot=fr.HotOptions(hot_set=path))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_hot_set_that_one_rank_cannot_read_is_the_same_error_on_all(
    cluster_2: Cluster, tmp_path: Path
) -> None:
    errors = cluster_2.run(error_with_unreadable_hot_set, str(tmp_path))
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"on rank 1: {tmp_path / 'rank_1.npz'} is no hot set: ")


def error_with_other_operators(name: str, value: object, hot: bool) -> str:
    """Rank 1 has operators of another release, or none."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(native, name, lambda: value)
        try:
            sharded(plan={"a": {"hot_rows": [1, 2]}} if hot else None)
        except ValueError as error:
            return str(error)
    return "no error"


def test_operators_must_be_of_one_release(cluster_2: Cluster) -> None:
    errors = cluster_2.run(error_with_other_operators, "identity", "0123", False)
    assert errors[0] == errors[1]
    assert "version.operators is " in errors[0]
    assert " on rank 0 and 0123 on rank 1" in errors[0]


def test_a_rank_without_operators_is_refused_with_hot_rows_only(cluster_2: Cluster) -> None:
    """Replicas would drift apart by the last bits of their sums."""
    if not native.available():
        pytest.skip("the C++ operators are not there")
    errors = cluster_2.run(error_with_other_operators, "available", False, True)
    assert errors[0] == errors[1]
    assert "use of C++ operators is True on rank 0 and False on rank 1" in errors[0]
    assert cluster_2.run(error_with_other_operators, "available", False, False) == ["no error"] * 2


def grid_error(differing_rank: int) -> str:
    every = 4 if dist.get_rank() == differing_rank else 2
    grid = fr.GridOptions(sharding_group_size=2, sync_every=every)
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="a", num_embeddings=8, embedding_dim=4, feature_names=["f"])],
        device=torch.device("meta"),
    )
    try:
        fr.GridModelParallel(bags, grid)
    except ValueError as error:
        return str(error)
    return "no error"


def test_options_of_groups_must_agree(cluster_4: Cluster) -> None:
    errors = cluster_4.run(grid_error, 3)
    assert set(errors) == {errors[0]}
    assert "grid.sync_every is 2 on ranks 0, 1, 2 and 4 on rank 3" in errors[0]


def threshold_error() -> str:
    density = 0.1 if dist.get_rank() else 0.2
    wrapper = fr.ThresholdedDataParallel(fr.ThresholdOptions(density=density))
    try:
        DistributedModelParallel(
            torch.nn.Linear(4, 4), device=CPU, plan=ShardingPlan({}), data_parallel_wrapper=wrapper
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_options_of_dense_gradients_must_agree(cluster_2: Cluster) -> None:
    errors = cluster_2.run(threshold_error)
    assert errors[0] == errors[1]
    assert "options.density is 0.2 on rank 0 and 0.1 on rank 1" in errors[0]
