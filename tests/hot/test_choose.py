"""Which rows become hot, and what is refused before training starts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.recorder import Recorder
from fusedrec_torchrec.hot.index import EMPTY
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.hot.replicas import hot_rows
from tests.parity import train_step

# Two buckets: (a, b) and c.
TABLES = (Table("a", 10), Table("b", 20), Table("c", 12, dim=16))
ROWS = {t.name: t.rows for t in TABLES}
CASE = Case(tables=TABLES, batch_sizes=(4, 4), optimizer="rowwise_adagrad")


def write_profile(path: Path, rows: dict[str, int] = ROWS) -> Path:
    """Row i of table a is used 100 - 10 i times, of b 95 - 4 i, of c 90 - 7 i."""
    recorder = Recorder(rows, 1000)
    uses = {"a": (100, 10), "b": (95, 4), "c": (90, 7)}
    ids = []
    for name, count in rows.items():
        first, less = uses[name]
        ids.append(np.repeat(np.arange(count), [max(first - less * i, 1) for i in range(count)]))
    recorder.add(ids, samples=1000)
    recorder.profile().save(path)
    return path


def hot_ids(case: Case, hot: fr.HotOptions | None) -> dict[str, list[int]]:
    """The hot rows of a model, by table."""
    model = sharded(case, hot=hot)
    rows = hot_rows(model)
    layout = model.module.sparse.fused.layout
    found = {}
    for t, table in enumerate(layout.tables):
        keys = layout.keys_of(t, torch.arange(table.rows)).tolist()
        used = {k for keys_H in rows.index.home_keys for k in keys_H.tolist()}
        found[table.name] = [i for i, key in enumerate(keys) if key in used]
    return found


def chosen(cluster: Cluster, hot: fr.HotOptions | None, case: Case = CASE) -> dict[str, list[int]]:
    first, second = cluster.run(hot_ids, case, hot)
    assert first == second
    return dict(first)


def test_ids_of_options_and_of_the_plan(cluster_2: Cluster) -> None:
    options = fr.HotOptions(tables={"a": fr.HotRule(ids=[9, 0]), "c": fr.HotRule(ids=[11])})
    assert chosen(cluster_2, options) == {"a": [0, 9], "b": [], "c": [11]}
    tables = (dataclasses.replace(TABLES[0], hot=(3,)), dataclasses.replace(TABLES[1], hot=(4, 5)))
    case = dataclasses.replace(CASE, tables=(*tables, TABLES[2]))
    # Options go before the plan.
    assert chosen(cluster_2, options, case) == {"a": [0, 9], "b": [4, 5], "c": [11]}


def test_top_k_of_all_tables_and_of_one(cluster_2: Cluster, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.npz")
    # 100 a0, 95 b0, 91 b1, 90 a1, 90 c0, 87 b2
    options = fr.HotOptions(rule=fr.HotRule(top_k=6), profile=profile)
    assert chosen(cluster_2, options) == {"a": [0, 1], "b": [0, 1, 2], "c": [0]}
    options = fr.HotOptions(
        rule=fr.HotRule(top_k=2), tables={"b": fr.HotRule(top_k=3)}, profile=profile
    )
    assert chosen(cluster_2, options) == {"a": [0, 1], "b": [0, 1, 2], "c": []}


def test_a_memory_budget(cluster_2: Cluster, tmp_path: Path) -> None:
    """A row of 8 columns takes 36 bytes with its optimizer state, one of 16 takes 68."""
    profile = write_profile(tmp_path / "p.npz")
    for memory, want in (
        (4 * 36, {"a": [0, 1], "b": [0, 1], "c": []}),
        (4 * 36 + 67, {"a": [0, 1], "b": [0, 1], "c": []}),
        (4 * 36 + 68, {"a": [0, 1], "b": [0, 1], "c": [0]}),
    ):
        options = fr.HotOptions(rule=fr.HotRule(memory=memory), profile=profile)
        assert chosen(cluster_2, options) == want


def test_the_cost_model_decides(cluster_2: Cluster, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.npz")
    hidden = fr.CostOptions(batch_size=100, hidden=1.0, latency=0.0)
    rule = fr.HotRule(cost_model=True)
    everything = {name: list(range(rows)) for name, rows in ROWS.items()}
    options = fr.HotOptions(rule=rule, profile=profile, cost=hidden)
    assert chosen(cluster_2, options) == everything
    visible = fr.CostOptions(batch_size=100, hidden=0.0)
    options = fr.HotOptions(rule=rule, profile=profile, cost=visible)
    assert chosen(cluster_2, options) == {"a": [], "b": [], "c": []}


def test_a_hot_set_from_a_file(cluster_2: Cluster, tmp_path: Path) -> None:
    HotSet(ROWS, {"a": np.array([7, 2]), "c": np.array([1])}).save(tmp_path / "h.npz")
    options = fr.HotOptions(hot_set=tmp_path / "h.npz", tables={"c": fr.HotRule(ids=[5])})
    assert chosen(cluster_2, options) == {"a": [2, 7], "b": [], "c": [5]}


def room(case: Case, hot: fr.HotOptions) -> list[tuple[int, int]]:
    rows = hot_rows(sharded(case, hot=hot))
    return [(len(keys), int((keys != EMPTY).sum())) for keys in rows.index.home_keys]


def test_room_for_what_adaptation_finds(cluster_2: Cluster, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.npz")
    adapt = fr.AdaptOptions(every=8)
    options = fr.HotOptions(rule=fr.HotRule(top_k=9), adapt=adapt)
    assert cluster_2.run(room, CASE, options)[0] == [(6, 0), (3, 0)]
    options = fr.HotOptions(rule=fr.HotRule(top_k=9), adapt=adapt, profile=profile)
    (places_ab, hot_ab), (places_c, hot_c) = cluster_2.run(room, CASE, options)[0]
    assert hot_ab + hot_c == 9 == places_ab + places_c  # a full budget leaves no room
    # Row-wise AdaGrad: 36 bytes of a row of a and b, 68 of a row of c.
    options = fr.HotOptions(rule=fr.HotRule(memory=720), adapt=adapt, profile=profile)
    (places_ab, _), (places_c, _) = cluster_2.run(room, CASE, options)[0]
    assert 720 - 68 < places_ab * 36 + places_c * 68 <= 720
    options = fr.HotOptions(rule=fr.HotRule(top_k=1), adapt=adapt)
    assert cluster_2.run(room, CASE, options)[0] == [(1, 0), (0, 0)]
    options = fr.HotOptions(rule=fr.HotRule(top_k=1000), adapt=adapt)
    assert cluster_2.run(room, CASE, options)[0] == [(30, 0), (12, 0)]


def fails(case: Case, hot: fr.HotOptions) -> str:
    with pytest.raises(ValueError, match=r"hot|profile") as error:
        sharded(case, hot=hot)
    return str(error.value)


def test_what_is_refused(cluster_2: Cluster, tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.npz")
    other = write_profile(tmp_path / "o.npz", {**ROWS, "b": 21})
    third = write_profile(tmp_path / "t.npz", {"a": 10, "b": 20})
    HotSet({**ROWS, "a": 11}, {}).save(tmp_path / "h.npz")

    def message(**options: Any) -> str:
        first, second = cluster_2.run(fails, CASE, fr.HotOptions(**options))
        assert first == second
        return str(first)

    def of_a(**rule: Any) -> dict[str, Any]:
        return {"tables": {"a": fr.HotRule(**rule)}}

    where = "hot rows of table 'a': "
    assert message(**of_a(ids=[10])) == where + "id 10 is out of range [0, 10)"
    assert message(**of_a(ids=[-1])) == where + "id -1 is out of range [0, 10)"
    assert message(**of_a(ids=[3, 4, 3])) == where + "id 3 is there more than once"
    assert message(**of_a(ids=[1.5])) == where + "ids must be a list of whole numbers"
    assert message(**of_a(memory=35)).startswith(
        where + "memory is 35 bytes, must be at least 36, which one row takes"
    )
    assert "memory is 67 bytes, must be at least 68" in message(
        rule=fr.HotRule(memory=67), profile=profile
    )
    for name, value in (("top_k", 3), ("memory", 1000)):
        text = message(**of_a(**{name: value}))
        assert text.startswith(f"{where}{name} needs hot.profile")
        assert "or hot.adapt" in text
    assert message(**of_a(cost_model=True)).startswith(where + "cost_model needs hot.profile")
    rule = fr.HotRule(top_k=3)
    assert "counted table 'b' with 21 rows, the model has 20" in message(rule=rule, profile=other)
    assert "has no table 'c'; it is of a, b" in message(rule=rule, profile=third)
    assert "does not exist" in message(rule=rule, profile=tmp_path / "missing.npz")
    assert "table 'a' with 11 rows, here it has 10" in message(hot_set=tmp_path / "h.npz")


def test_optimizers_that_count_the_steps_of_a_row_are_refused(cluster_2: Cluster) -> None:
    settings = (
        ("weight_decay", 0.01),
        ("weight_decay_mode", WeightDecayMode.COUNTER),
        ("counter_based_regularization", CounterBasedRegularizationDefinition()),
    )
    case = dataclasses.replace(CASE, settings=settings)
    hot = fr.HotOptions(tables={"a": fr.HotRule(ids=[1])})
    (text, _) = cluster_2.run(fails, case, hot)
    assert "weight_decay_mode must be NONE, L2 or DECOUPLE" in text


def names_a_table_that_is_not_there(case: Case) -> str:
    model = sharded(case, hot=fr.HotOptions(tables={"z": fr.HotRule(ids=[1])}))
    with pytest.raises(ValueError, match=r"hot\.tables names table 'z'") as error:
        train_step(case, model, 0)
    return str(error.value)


def test_unknown_tables(cluster_2: Cluster) -> None:
    (text, _) = cluster_2.run(names_a_table_that_is_not_there, CASE)
    assert text == "hot.tables names table 'z', must be among the fused tables ['a', 'b', 'c']"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({}, "sets nothing, must set exactly one of ids, top_k, memory, cost_model"),
        ({"ids": [1], "top_k": 1}, "sets ids and top_k, must set exactly one"),
        ({"top_k": 0}, "top_k is 0: it should be greater than or equal to 1"),
        ({"memory": 0}, "memory is 0: it should be greater than or equal to 1"),
    ],
)
def test_bad_rules(rule: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fr.HotRule(**rule)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (fr.HotOptions, {"sync_every": 0}, "sync_every is 0: it should be greater"),
        (fr.HotOptions, {"rule": fr.HotRule(ids=[1])}, "rule.ids must be given table by table"),
        (
            fr.HotOptions,
            {"rule": fr.HotRule(top_k=1), "hot_set": Path("x")},
            "rule and hot_set are both given",
        ),
        (fr.AdaptOptions, {"every": 0}, "every is 0: it should be greater than or equal to 1"),
        (fr.AdaptOptions, {"counters": 0}, "counters is 0: it should be greater than or"),
        (fr.AdaptOptions, {"every": 10, "sample": 3}, "must be a multiple of sample, 3"),
        (
            fr.AdaptOptions,
            {"decay": 1.5},
            "decay is 1.5: it should be less than or equal to 1 and greater than or equal to 0",
        ),
        (fr.AdaptOptions, {"margin": 0.5}, "margin is 0.5: it should be greater than or equal to"),
        (
            fr.AdaptOptions,
            {"every": 64, "margin": math.nan},
            "margin is nan: it should be a finite",
        ),
        (fr.AdaptOptions, {"decay": math.nan}, "decay is nan: it should be a finite number"),
    ],
)
def test_bad_options(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**options)
