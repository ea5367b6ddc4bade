"""A new TorchRec, FBGEMM or torch fails here first, and says which of its insides have changed."""

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from fusedrec_torchrec.compat.private_names import (
    PRIVATE_NAMES,
    UNDOCUMENTED_NAMES,
    PrivateName,
)
from tests.private_uses import (
    attribute_uses,
    defines,
    inherited_by,
    inherited_names,
    reached_names,
)

# Python's own, and documented.
OF_PYTHON = {
    "_exit",
    "_getframe",
    "_actions",
    "_choices_actions",
    "_AppendAction",
    "_SubParsersAction",
}
# Attributes of FBGEMM's tables whose names our own objects have, too.
OUR_WORDS = {
    "current_device",
    "dims",
    "eps",
    "optimizer",
    "step",
    "table_names",
    "weight_decay",
    "momentum",
}
# Made of a prefix and one of these.
COMPOSED = ("_physical_offsets", "_physical_placements", "_dev", "_host", "_uvm")


def resolve(path: str) -> Any:
    """Returns a module, or a class of one."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"there is no {path}")


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda p: f"{p.owner}.{p.name}")
def test_private_names_are_there(private: PrivateName) -> None:
    what = f"{private.owner}.{private.name}: look where fusedrec_torchrec uses it"
    try:
        owner = resolve(private.owner)
    except AttributeError:
        pytest.fail(f"{private.owner} has gone; {what}")
    is_there = hasattr(owner, private.name) or (
        any(defines(each, private.name) for each in owner.__mro__)
        if inspect.isclass(owner)
        else f".{private.name}" in inspect.getsource(owner)  # set on objects of others
    )
    assert is_there, f"has gone: {what}"
    if private.parameters is not None:
        parameters = list(inspect.signature(getattr(owner, private.name)).parameters)
        if private.parameters[:1] == ("self",):  # overridden or called by position
            parameters = parameters[: len(private.parameters)]
        else:  # called by name
            parameters = [name for name in parameters if name in private.parameters]
        assert tuple(parameters) == private.parameters, f"has other parameters: {what}"


def test_the_list_has_every_private_name_that_is_used_through_self() -> None:
    listed = {(private.owner, private.name) for private in PRIVATE_NAMES}
    missing = {use: where for use, where in inherited_names().items() if use not in listed}
    assert not missing


def test_others_are_reached_from_compat_only_and_listed() -> None:
    listed = {private.name for private in PRIVATE_NAMES} | OF_PYTHON
    for file, line, name in reached_names():
        assert file.parts[0] == "compat" or name in OF_PYTHON, f"{file}:{line} reaches {name}"
        assert name in listed, f"{file}:{line} reaches {name}, which is not in private_names"


def test_the_list_has_nothing_that_nobody_uses() -> None:
    used = {name for _, name in inherited_names()} | {name for _, _, name in reached_names()}
    unused = {private.name for private in PRIVATE_NAMES} - used
    assert not unused


class Mixin:
    """Uses what it does not inherit itself."""

    def settings(self) -> Any:
        return self._fused_params  # type: ignore[attr-defined]

    def order(self) -> Any:
        return getattr(self, "_sharded_module_order_overwrite", self._own)

    _own = None


class Mixed(Mixin, EmbeddingBagCollectionSharder):
    pass


def test_what_a_mixin_uses_counts_where_it_is_mixed_in() -> None:
    owner = "torchrec.distributed.embedding_types.BaseEmbeddingSharder"
    wanted = {(owner, "_fused_params"), (owner, "_sharded_module_order_overwrite")}
    assert inherited_by(Mixin) == {}
    assert inherited_by(Mixed).keys() == wanted


def test_a_name_is_reached_whoever_else_in_the_file_has_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    def f(self, table):\n"
        "        self._x = A._x = getattr(self, '_x')\n"
        "        return table._x\n"
        "_x = getattr(table, '_x')\n"
    )
    assert list(reached_names(tmp_path)) == [(Path("a.py"), 5, "_x"), (Path("a.py"), 4, "_x")]


@cache
def fbgemm_objects() -> tuple[Any, ...]:
    """Returns tables, with and without counters of steps, and the settings of an optimizer."""
    counted = {
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": CounterBasedRegularizationDefinition(),
    }
    tables = [
        SplitTableBatchedEmbeddingBagsCodegen(
            [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            **settings,
        )
        for settings in ({}, counted)
    ]
    return *tables, tables[0].optimizer_args


def undocumented_attributes() -> set[str]:
    """Returns all that objects of FBGEMM have without an underscore, but for methods."""
    of_torch = set(dir(nn.Module()))
    return {
        name
        for each in fbgemm_objects()
        for name in set(dir(each)) - of_torch
        if not name.startswith("_") and not callable(getattr(each, name))
    }


@pytest.mark.parametrize("inside", UNDOCUMENTED_NAMES, ids=lambda p: p.name)
def test_undocumented_names_are_there(inside: PrivateName) -> None:
    owner = resolve(inside.owner)
    having = [each for each in fbgemm_objects() if isinstance(each, owner)]
    assert having, f"{inside.owner} is not what FBGEMM makes any more"
    what = f"{inside.owner}.{inside.name}: look where fusedrec_torchrec uses it"
    assert any(hasattr(each, inside.name) for each in having), f"has gone: {what}"


def test_undocumented_names_are_used_in_compat_only_and_listed() -> None:
    listed = {inside.name for inside in UNDOCUMENTED_NAMES}
    insides = undocumented_attributes()
    for file, line, of_what, name in attribute_uses():
        of_table = of_what.endswith("table")
        if name not in insides or (name in OUR_WORDS and not of_table):
            continue
        assert file.parts[0] == "compat", f"{file}:{line} reaches {of_what}.{name}"
        assert name in listed, f"{file}:{line} reaches {of_what}.{name}, which is not listed"


def test_undocumented_names_that_nobody_uses_are_not_listed() -> None:
    used = {name for file, _, _, name in attribute_uses() if file.parts[0] == "compat"}
    unused = {inside.name for inside in UNDOCUMENTED_NAMES} - used
    assert not {name for name in unused if not name.endswith(COMPOSED)}
