"""Configuration trees: strict, explained, overridable, and the ready ones are valid."""

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import Field

from fusedrec_torchrec.core.config import (
    OwnWords,
    from_mapping,
    load_yaml,
    options,
    section,
    to_yaml,
    with_overrides,
)
from fusedrec_torchrec.training.config import TrainConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TABLES = [{"name": "a", "rows": 10}]


@section
class Plain:
    """A section whose fields have no ranges.

    Attributes:
        size: how large it is,
            in metres.
        other: something else.
    """

    size: float = 1.0
    other: int = 2


@section
class Leaf:
    """A leaf.

    Attributes:
        count: How many.
        own: One of two, checked in words of its own.
    """

    count: int = Field(default=3, ge=1)
    own: OwnWords[Literal["a", "b"]] = "a"

    def __post_init__(self) -> None:
        if self.own not in ("a", "b"):
            raise ValueError(f"own is {self.own!r}, must be one of a, b")


@section
class Tree:
    """A tree.

    Attributes:
        leaves: All leaves.
        named: By name.
        one: A leaf of its own.
        plain: A section whose fields have no ranges.
    """

    leaves: list[Leaf] = Field(default=[])
    named: dict[str, Leaf] = Field(default={})
    one: Leaf = Leaf()
    plain: Plain = Plain()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"on": {}}, "t.yaml: on is unknown; did you mean 'one'? allowed: leaves, named, one"),
        ({"one": {"cuont": 1}}, "t.yaml: one.cuont is unknown; did you mean 'count'?"),
        ({"leaves": [{}, {"x": 1}]}, "t.yaml: leaves.1.x is unknown; allowed: count, own"),
        ({"named": {"a": {"x": 1}}}, "t.yaml: named.a.x is unknown; allowed: count, own"),
        ({"one": {"count": 0}}, "t.yaml: one.count is 0: it should be greater than or equal to 1"),
        ({"one": {"count": "many"}}, "t.yaml: one.count is 'many': it should be a valid integer"),
        ({"one": 5}, "t.yaml: one is 5: it should be a dictionary"),
    ],
)
def test_problems_say_where_what_and_what_is_allowed(data: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=r"^t\.yaml") as caught:
        from_mapping(Tree, data, "t.yaml")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "error", "problem"),
    [
        ({"count": 0}, ValueError, "count is 0: it should be greater than or equal to 1"),
        ({"count": "many"}, ValueError, "count is 'many': it should be a valid integer"),
        ({"own": "d"}, ValueError, "own is 'd', must be one of a, b"),
        ({"x": 1}, TypeError, r"Leaf.__init__\(\) got an unexpected keyword argument 'x'"),
    ],
)
def test_problems_are_the_same_in_python(
    settings: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=f"^{problem}"):
        Leaf(**settings)


def test_own_words_are_those_of_python_only() -> None:
    with pytest.raises(ValueError, match=r"^t\.yaml: one\.own is 'd': it should be 'a' or 'b'$"):
        from_mapping(Tree, {"one": {"own": "d"}}, "t.yaml")


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        from_mapping(Tree, {"x": 1, "one": {"count": 0}}, "t.yaml")
    assert len(str(caught.value).splitlines()) == 2


def test_options_explain_every_setting() -> None:
    found = {option.path: option for option in options(Tree)}
    assert list(found) == [
        *("leaves", "leaves.*.count", "leaves.*.own", "named", "named.*.count", "named.*.own"),
        *("one.count", "one.own"),
        *("plain.size", "plain.other"),
    ]
    assert found["one.count"].description == "How many."
    assert found["one.count"].default == "3" and found["one.count"].type == "int"
    assert found["plain.size"].description == "how large it is, in metres."
    assert found["plain.other"].description == "something else."
    assert all(option.description for option in options(TrainConfig))


def test_overrides_reach_sections_lists_and_new_keys() -> None:
    data = {"leaves": [{"count": 1}, {"count": 2}], "one": None}
    changed = with_overrides(data, ["leaves.1.count=7", "one.count=5", "named={a: {count: 9}}"])
    tree = from_mapping(Tree, changed)
    assert [leaf.count for leaf in tree.leaves] == [1, 7]
    assert tree.one.count == 5 and tree.named["a"].count == 9
    assert data["leaves"][1] == {"count": 2}  # type: ignore[index]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("one.count", "must have the form section.key=value"),
        ("=3", "must have the form section.key=value"),
        ("leaves.5.count=1", "'5' must be the number of a list item, 0 to 0"),
        ("leaves.x.count=1", "'x' must be the number of a list item"),
        ("one.count.deep=1", "'count' holds a value, not a section"),
        ("one.count=[1", "is not valid YAML"),
    ],
)
def test_bad_overrides_are_named(override: str, problem: str) -> None:
    with pytest.raises(ValueError, match="override") as caught:
        with_overrides({"leaves": [{"count": 1}], "one": {"count": 2}}, [override])
    assert problem in str(caught.value)


def test_files_that_hold_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"configuration file .*no\.yaml does not exist"):
        load_yaml(tmp_path / "no.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ValueError, match="holds a list, must hold a mapping"):
        load_yaml(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not valid YAML"):
        load_yaml(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").touch()
    assert load_yaml(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_ready_configurations_are_valid_and_survive_a_round_trip(path: Path) -> None:
    config = from_mapping(TrainConfig, load_yaml(path), path.name)
    assert from_mapping(TrainConfig, yaml.safe_load(to_yaml(config))) == config


def test_there_is_a_configuration_for_each_purpose() -> None:
    names = {path.stem for path in CONFIGS}
    assert names >= {"tiny", "criteo_kaggle", "criteo_terabyte", "movielens_like", "multi_node"}
    assert names >= {"avazu", "movielens", "taobao"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tables": []}, "tables is empty, must list at least one"),
        ({"tables": TABLES * 2}, "tables has the name 'a' more than once"),
        ({"tables": [{"name": "items", "rows": 5}]}, "tables has 'items', a name that torch needs"),
        ({"tables": [{"name": "t", "rows": 1, "copies": 2}, {"name": "t_1", "rows": 1}]}, "'t_1'"),
        ({"model": {"dense_arch": [8]}}, "dense_arch ends in 8, must end in embedding_dim, 16"),
        ({"model": {"over_arch": [8, 2]}}, "over_arch ends in 2, must end in 1"),
        ({"model": {"over_arch": [0, 1]}}, "layer sizes [0, 1] must be 1 or more each"),
        ({"model": {"embedding_dim": 6, "dense_arch": [6]}}, "multiple of 4"),
        (
            {"model": {"architecture": "dlrm_projection", "projection_branches": [[16], [17]]}},
            "a branch that ends in 17, must end in a multiple of embedding_dim, 16",
        ),
        ({"data": {"batch_size": 100}}, "batch_size is 100, must be a multiple of lanes, 8"),
        ({"data": {"eval_batch_size": 9}}, "eval_batch_size is 9, must be a multiple of lanes, 8"),
        ({"data": {"held_out": 1.0}}, "data.held_out is 1.0: it should be less than 1"),
        ({"data": {"source": "criteo"}}, "criteo.prepared must name a folder"),
        ({"data": {"criteo": {"files": ["x"]}}}, "prepared must name the folder"),
        (
            {"data": {"source": "criteo", "criteo": {"prepared": "x"}}},
            "tables must be left out: data in files brings its own",
        ),
        ({"sharding": {"type": "rowwise"}}, "sharding.type is 'rowwise': it should be"),
        (
            {"sharding": {"tables": {"a": "x"}}},
            "sharding.tables.a is 'x': it should be 'fused_row_wise'",
        ),
        ({"sharding": {"exchange": {"input_dist": "x"}}}, "input_dist is 'x': it should be"),
        (
            {"sharding": {"hot": {"adapt": {"decay": 2}}}},
            "hot.adapt.decay is 2: it should be less than or equal to 1 and greater than or equal",
        ),
        (
            {"sharding": {"hot": {"tables": {"a": {"top_k": 0}}}}},
            "hot.tables.a.top_k is 0: it should be greater than or equal to 1",
        ),
        (
            {"sharding": {"hot": {"cost": {"latency": float("nan")}}}},
            "hot.cost.latency is nan: it should be a finite number and greater than or equal to 0",
        ),
        ({"sharding": {"exchange": {"slack": 1}}}, "sharding.exchange.slack is unknown"),
        (
            {"optimizer": {"schedule": {"warmup_steps": 9, "decay_start": 5}}},
            "decay_start is 5, must not be before warmup_steps, 9",
        ),
        ({"optimizer": {"schedule": {"decay_end": 5}}}, "decay_end needs decay_start"),
        (
            {"optimizer": {"schedule": {"decay_start": 5, "decay_end": 5}}},
            "decay_end is 5, must be after decay_start, 5",
        ),
        (
            {"launch": {"nodes": 2}},
            "rendezvous is None, must be host:port with a port from 1 to 65535 when nodes is 2",
        ),
        ({"launch": {"min_nodes": 2}}, "min_nodes is 2, must not be more than nodes, 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=r"^x\.yaml") as caught:
        from_mapping(TrainConfig, {"tables": TABLES, **changes}, "x.yaml")
    assert problem in str(caught.value)
