"""Settings of tables: what contradicts itself or cannot work is refused in words."""

from typing import Any

import pytest
from torch import nn

from fusedrec_torchrec.core.config import from_mapping, to_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.table_options import TAKEN, TableOptions

GOOD: dict[str, Any] = {"files": ["a.csv"], "label": "y", "sparse": {"user": {}}}


def test_the_shortest_description_is_enough_and_says_where_the_data_comes_from() -> None:
    config = from_mapping(TrainConfig, {"data": {"table": GOOD}})
    assert config.data.source == "table" and config.data.table is not None
    assert from_mapping(TrainConfig, to_mapping(config)) == config
    assert from_mapping(TrainConfig, {"tables": [{"name": "a", "rows": 3}]}).data.source == (
        "synthetic"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"files": [], "label": "", "sparse": {}}, "files is empty, must name files, folders or"),
        ({"label": ""}, "label is missing, must be a column or an expression such as"),
        ({"sparse": {}}, "sparse is empty, must have at least one feature"),
        ({"sparse": {"a b": {}}}, "sparse has a feature called 'a b', must be letters, digits"),
        ({"sparse": {"a": {"table": "x.y"}}}, "sparse has a table called 'x.y', must be letters"),
        ({"sparse": {"type": {}}}, "sparse.type: the table cannot be called 'type'"),
        ({"sparse": {"a": {"weights": "w"}}}, "weights is 'w', which is for bags"),
        ({"sparse": {"a": {"separator": "|"}}}, "separator is '|', which is for bags"),
        ({"sparse": {"a": {"max_ids": 3}}}, "max_ids is 3, which is for bags"),
        ({"sparse": {"a": {"colum": "x"}}}, "colum is unknown; did you mean 'column'?"),
        ({"dense": ["user"]}, "have the name 'user' more than once"),
        ({"dense": ["label"]}, "'label' more than once (label is that of the label itself)"),
        ({"tables": {"item": {}}}, "tables names 'item', which is the table of no feature; there"),
        (
            {"tables": {"user": {"hash_rows": 9, "min_count": 2}}},
            "min_count is 2 and hash_rows is 9, must leave out one of them",
        ),
        ({"tables": {"user": {"hash_rows": 1}}}, "hash_rows is 1: it should be greater than"),
        ({"split": {"by": "time"}}, "start is missing, must be there when by is time"),
        ({"split": {"by": "time", "start": "2020-01-01"}}, "timestamp is missing, must name a col"),
        ({"split": {"by": "time", "start": "soon"}}, "start is 'soon', must be a time such as"),
        ({"split": {"by": "file"}}, "files is missing, must be there when by is file"),
        ({"split": {"by": "random"}}, "share is missing, must be there when by is random"),
        ({"split": {"share": 0.1}}, "share is for by: random, but by is end"),
        ({"times": {"h": "hour"}}, "timestamp is missing, must name a column: times are parts"),
        ({"times": {"h": "century"}}, "times.h is 'century'"),
        (
            {"timestamp": {"column": "t", "unit": "s", "format": "%y"}},
            "unit is 's' and format is '%y', must leave out one of them",
        ),
        ({"transforms": {"x": "log"}}, "transforms names 'x', which is no dense column; there"),
        ({"csv": {"delimiter": "::"}}, "csv.delimiter is '::'"),
        ({"csv": {"delimiter": "'", "quote": "'"}}, 'quote is "\'", must not be the delimiter'),
        ({"csv": {"columns": ["a", "a"]}}, "columns have the name 'a' more than once"),
        ({"format": "xml"}, "format is 'xml'"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"data\.table") as caught:
        from_mapping(TrainConfig, {"data": {"table": {**GOOD, **changes}}})
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"source": "table"}, "table is missing, but source is table"),
        ({"source": "synthetic", "table": GOOD}, "table is set, but source is synthetic"),
        (
            {"held_out": 0.3, "table": {**GOOD, "split": {"by": "random", "share": 0.1}}},
            "held_out is 0.3 and table.split.by is random, must leave out one of them",
        ),
    ],
)
def test_what_contradicts_the_rest_of_the_data_is_named(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="data") as caught:
        from_mapping(TrainConfig, {"data": data, "tables": []})
    assert problem in str(caught.value)


def test_names_that_torch_needs_are_known() -> None:
    """A table of any other name can be in a model."""
    attributes = {name for name in dir(nn.ModuleDict()) if not name.startswith("_")}
    assert attributes <= TAKEN


def test_times_may_be_dates_of_yaml_or_texts() -> None:
    import yaml

    start = "{split: {by: time, start: 2017-12-03}, timestamp: {column: t}}"
    given = TableOptions(**{**GOOD}).split
    assert given.by == "end"
    options = from_mapping(TableOptions, {**GOOD, **yaml.safe_load(start)})
    again = from_mapping(TableOptions, to_mapping(options))
    assert options == again and options.split.start == "2017-12-03 00:00:00"
