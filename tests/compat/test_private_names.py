"""A new TorchRec, FBGEMM or torch fails here first, and says which of its insides have changed."""

import importlib
import inspect
from typing import Any

import pytest

from fusedrec_torchrec.compat.private_names import PRIVATE_NAMES, PrivateName
from tests.private_uses import defines, inherited_names, reached_names

# Python's own, and documented.
OF_PYTHON = {"_exit", "_getframe"}


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
    also = {"_set_learning_rate"}  # a mixin uses it
    unused = {private.name for private in PRIVATE_NAMES} - used - also
    assert not unused
