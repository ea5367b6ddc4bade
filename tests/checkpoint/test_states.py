"""Optimizer states under other names and shapes, by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from fusedrec_torchrec.checkpoint import convert as module
from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.convert import convert, plan_for
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.table_state import StateNames, StoredState, parse_state
from fusedrec_torchrec.sharding.sharding_type import SHARDINGS
from tests.case import Case, Table, sharded
from tests.cluster import Cluster


class InMemory:
    """A checkpoint that is a dictionary, with shards of columns that are not of one width."""

    path = Path("memory")

    def __init__(self, tensors: dict[str, torch.Tensor], columns: dict[str, list[int]]) -> None:
        self._numbers = tensors
        self.tensors = {}
        for name, tensor in tensors.items():
            at, chunks = 0, []
            for width in columns.get(name, []):
                size = torch.Size((tensor.size(0), width))
                chunks.append(ChunkStorageMetadata(torch.Size((0, at)), size))
                at += width
            self.tensors[name] = TensorStorageMetadata(TensorProperties(), tensor.size(), chunks)

    def read(self, name: str, offsets: Any, into: torch.Tensor) -> None:
        where = tuple(slice(o, o + s) for o, s in zip(offsets, into.shape, strict=True))
        into.copy_(self._numbers[name][where])


def test_numbers_of_column_shards_are_averaged_by_columns() -> None:
    gradient = torch.rand(5, 16)
    widths = [4, 12]
    squares = [(part * part).mean(1) for part in gradient.split(widths, dim=1)]
    reader: Any = InMemory({"w": gradient, "s": torch.cat(squares)}, {"w": widths})
    stored = StoredState(reader, "s", 5, 16, "w")
    assert stored.column_shards == 2 and not stored.by_element
    found = torch.empty(3)
    stored.rows(2, found)
    torch.testing.assert_close(found, (gradient * gradient).mean(1)[2:])


def test_equal_numbers_stay_what_they_are() -> None:
    numbers = torch.rand(5)
    reader: Any = InMemory({"w": torch.zeros(5, 12), "s": numbers.repeat(3)}, {"w": [4, 4, 4]})
    found = torch.empty(5)
    StoredState(reader, "s", 5, 12, "w").rows(0, found)
    assert torch.equal(found, numbers)  # a third of three times a number is not always it


def test_names() -> None:
    weight = "model.x.embedding_bags.a.weight"
    names = StateNames(
        [weight, "optimizer.state.fused.x.embedding_bags.a.weight.a.momentum1"], "model"
    )
    for wanted, found in (("sum", True), ("exp_avg", True), ("exp_avg_sq", False), ("odd", False)):
        state = parse_state(f"optimizer.state.x.embedding_bags.a.weight.{wanted}")
        assert state is not None and state.table == "a"
        assert (names.find("x.embedding_bags.a.weight", state) is not None) == found
    dense = StateNames([weight, "optimizer.state.x.embedding_bags.a.weight.sum"], "model")
    adam = parse_state("optimizer.state.x.embedding_bags.a.weight.exp_avg")
    assert adam is not None and dense.find("x.embedding_bags.a.weight", adam) is None
    assert parse_state("model.over.weight") is None


def write(folder: Path, states: dict[str, torch.Tensor], rows: int = 50, dim: int = 8) -> None:
    weight = "sparse.embedding_bags.a.weight"
    save(
        {"model": {weight: torch.zeros(rows, dim)}, "optimizer": {"state": {weight: states}}},
        checkpoint_id=folder,
        no_dist=True,
    )


def load_into_adagrad(folder: str, names: str) -> tuple[str, bool]:
    tables = tuple(Table(name, 50) for name in names)
    case = Case(tables=tables, batch_sizes=(5, 5), optimizer="adagrad")
    model: Any = sharded(case)
    before = {k: v.local_shards()[0].tensor.clone() for k, v in model.state_dict().items()}
    try:
        load_checkpoint(folder, model, model.fused_optimizer)
    except ValueError as error:
        after = model.state_dict()
        same = all(torch.equal(after[k].local_shards()[0].tensor, t) for k, t in before.items())
        return str(error), same
    return "nothing was wrong", True


@pytest.mark.parametrize(
    ("states", "rows", "problem"),
    [
        (
            {"exp_avg": (50, 8), "exp_avg_sq": (50, 8), "step": ()},
            50,
            "wants the state 'momentum1' among 1, the checkpoint has exp_avg, exp_avg_sq, step",
        ),
        ({"momentum_buffer": (50, 8)}, 50, "the checkpoint has momentum_buffer: it was trained"),
        ({"sum": (50, 8)}, 50, "has no 'model.sparse.embedding_bags.b.weight'"),
        ({"sum": (51, 8)}, 51, "has shape (51, 8), the model's has (50, 8)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    cluster_2: Cluster, tmp_path: Path, states: dict[str, tuple[int, ...]], rows: int, problem: str
) -> None:
    write(tmp_path, {name: torch.rand(size) for name, size in states.items()}, rows)
    names = "ab" if "has no" in problem else "a"
    for error, untouched in cluster_2.run(load_into_adagrad, str(tmp_path), names):
        assert problem in error and untouched


@pytest.mark.parametrize("piece", [1, 100, 1 << 30])
def test_conversions_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(module, "FILE", 3 * piece)
    numbers = torch.rand(50)
    write(tmp_path / "it", {"a.momentum1": numbers, "max_counter": torch.tensor([7.0])})
    contents = Contents(tmp_path / "it")
    for sharding in SHARDINGS:
        target = tmp_path / sharding
        convert(contents, target, plan_for(contents, 2, sharding))
        found = Contents(target)
        table = found.tables["a"]
        kind = "sum" if sharding == "data_parallel" else "momentum1"
        got = torch.empty(50)
        found.state(table, kind).rows(0, got)
        assert torch.equal(got, numbers)
        assert found.reader.whole(table.states["max_counter"]).tolist() == [7.0]
        # What makes nested names of flat ones again.
        paths = found.reader.metadata.planner_data
        assert paths.keys() == set(found.reader.tensors)
        assert all(name == ".".join(path) for name, path in paths.items())
        shards = 2 if "row" in sharding or "column" in sharding else 1
        assert table.shards >= shards
        planned = {plan.sharding for plan in plan_for(contents, 2, sharding).tables.values()}
        assert planned == {sharding}


def test_states_of_torchs_optimizers_survive_a_way_through_shards(tmp_path: Path) -> None:
    states = {
        "exp_avg": torch.rand(50, 8),
        "exp_avg_sq": torch.rand(50, 8),
        "step": torch.tensor(7.0),
    }
    write(tmp_path / "it", states)
    first = Contents(tmp_path / "it")
    convert(first, tmp_path / "sharded", plan_for(first, 2, "table_wise"))
    second = Contents(tmp_path / "sharded")
    assert set(second.tables["a"].states) == {"momentum1", "exp_avg_sq", "step"}
    convert(second, tmp_path / "back", plan_for(second, 2, "data_parallel"))
    back = Contents(tmp_path / "back")
    assert set(back.tables["a"].states) == set(states)
    for kind, tensor in states.items():
        assert torch.equal(back.reader.whole(back.tables["a"].states[kind]), tensor)
    buffer = {"momentum_buffer": torch.rand(50, 8)}
    write(tmp_path / "sgd", buffer)
    third = Contents(tmp_path / "sgd")
    convert(third, tmp_path / "sgd_too", plan_for(third, 4, "data_parallel"))
    assert "momentum_buffer" in Contents(tmp_path / "sgd_too").tables["a"].states
