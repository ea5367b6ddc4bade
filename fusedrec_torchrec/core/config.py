"""Configuration files: one YAML file is one tree of dataclasses.

A class becomes a section by the decorator ``section``: a frozen dataclass with keyword-only fields,
whose types and ranges are checked in Python as in files.  Its docstring describes them under
``Attributes:``, its ``__post_init__`` checks what one field alone cannot tell, and unknown keys are
refused.  The same names appear in the YAML file, in Python and in ``--set a.b=c``.
"""

import copy
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, ValidationInfo, WrapValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fusedrec_torchrec.core.folder_files import shown
from fusedrec_torchrec.core.safe_yaml import parse_yaml, read_yaml

__all__ = [
    "NO_OTHER_KEYS",
    "Option",
    "OwnWords",
    "check_is_file",
    "from_mapping",
    "load_yaml",
    "options",
    "section",
    "to_mapping",
    "to_yaml",
    "with_overrides",
]

T = TypeVar("T")
MOST_PROBLEMS = 100  # that are named
NO_OTHER_KEYS = ConfigDict(extra="forbid")
IN_A_FILE = "in a file"
BOUNDS = {
    "gt": "greater than",
    "ge": "greater than or equal to",
    "lt": "less than",
    "le": "less than or equal to",
}
# What pydantic calls problems with the size of a number; it names only the bound that is passed.
OF_NUMBERS = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("finite_number", "int_parsing", "int_type", "int_from_float", "float_parsing", "float_type"),
)


def _check_in_files(value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
    return check(value) if info.context == IN_A_FILE else value


OwnWords = Annotated[T, WrapValidator(_check_in_files)]
"""The type of a setting that ``__post_init__`` checks in words of its own, if it is made in Python.

In a file, where the problem is told with its place, it is checked as every other setting.
"""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(FieldInfo,))
def section(cls: type[T]) -> type[T]:
    """Makes a class a section of a configuration: frozen, keyword-only, no unknown keys, no NaN.

    What is wrong with an object that is made in Python is a ``ValueError`` in the words that a file
    with the same mistake is answered with; a missing or unknown argument is a ``TypeError``, as it
    is for every other class.
    """
    made: Any = pydantic_dataclass(
        config=ConfigDict(**NO_OTHER_KEYS, allow_inf_nan=False, json_schema_extra=_describe),
        frozen=True,
        kw_only=True,
    )(cls)
    check_and_set = made.__init__

    @functools.wraps(check_and_set)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807
        try:
            check_and_set(self, *args, **settings)
        except ValidationError as error:
            try:
                inspect.signature(made).bind(*args, **settings)
            except TypeError as mistake:
                raise TypeError(f"{made.__name__}.__init__() {mistake}") from None
            raise ValueError("\n".join(_problems(made, error))) from None

    made.__init__ = __init__
    return made


def _describe(schema: dict[str, Any], cls: type[Any]) -> None:
    """Adds the descriptions of a class and of its fields to its JSON Schema."""
    schema["description"] = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    for name, field in schema["properties"].items():
        field["description"] = " ".join(_described(cls, name).split())


def check_is_file(path: Path) -> None:
    """Refuses a path at which there is no configuration file.

    Raises:
        ValueError: there is nothing, or a folder.
    """
    if path.is_dir():
        raise ValueError(f"configuration file {path} is a folder, must be a YAML file")
    if not path.is_file():
        raise ValueError(f"configuration file {path} does not exist")


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping that a YAML file holds, unchecked.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    path = Path(path)
    check_is_file(path)
    data = read_yaml(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, must hold a mapping")
    return data


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of ``data`` with ``a.b=c`` applied.

    ``c`` is read as YAML; a number in the place of ``b`` stands for an item of a list.

    Raises:
        ValueError: an override has another form, or leads nowhere.
    """
    result: Any = copy.deepcopy(dict(data))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"override {override!r} must have the form section.key=value")
        value = parse_yaml(text, f"override {override!r}")
        node = result
        for key in keys[:-1]:
            if isinstance(node, list):
                node = node[_item(node, key, override)]
            else:
                if node.get(key) is None:
                    node[key] = {}
                node = node[key]
            if not isinstance(node, dict | list):
                raise ValueError(f"override {override!r}: {key!r} holds a value, not a section")
        if isinstance(node, list):
            node[_item(node, keys[-1], override)] = value
        else:
            node[keys[-1]] = value
    return result


def _item(node: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise ValueError(
            f"override {override!r}: {key!r} must be the number of a list item, "
            f"0 to {len(node) - 1}"
        )
    return int(key)


def from_mapping(cls: type[T], data: Mapping[str, Any], source: str = "configuration") -> T:
    """Builds the tree ``cls`` from ``data``.

    Raises:
        ValueError: one line for each problem: where, what is there, what is allowed.
    """
    try:
        return TypeAdapter(cls).validate_python(dict(data), context=IN_A_FILE)
    except ValidationError as error:
        lines = [f"{source}: {problem}" for problem in _problems(cls, error)]
        raise ValueError("\n".join(lines)) from None


def _problems(cls: type[Any], error: ValidationError) -> list[str]:
    """Returns a line for each of the first problems."""
    errors = error.errors()
    lines = [_problem(cls, dict(item)) for item in errors[:MOST_PROBLEMS]]
    if len(errors) > MOST_PROBLEMS:
        lines.append(f"and {len(errors) - MOST_PROBLEMS} more problems")
    return lines


def _problem(cls: type[Any], item: dict[str, Any]) -> str:
    where, what = [str(name) for name in item["loc"]], item["input"]
    if item["type"] == "unexpected_keyword_argument":
        allowed = [field.name for field in dataclasses.fields(_section_at(cls, where[:-1]))]
        close = difflib.get_close_matches(where[-1], allowed, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{'.'.join(where)} is unknown; {hint}allowed: {', '.join(allowed)}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{'.'.join(where)} is missing"
    if item["type"] == "value_error":  # our own checks name the field and its value
        return f"{'.'.join(where)}: {message}" if where else message
    message = message[0].lower() + message[1:]
    if item["type"] in OF_NUMBERS:
        bounds = [text for text in _bounds(_field_at(cls, where)) if text not in message]
        message = " and ".join([message, *bounds])
    return f"{'.'.join(where)} is {shown(what)}: {message.replace('input should', 'it should')}"


def _bounds(field: FieldInfo | None) -> Iterator[str]:
    """Yields the bounds of a number, in the words of pydantic."""
    for bound in () if field is None else field.metadata:
        for name, words in BOUNDS.items():
            if hasattr(bound, name):
                yield f"{words} {getattr(bound, name)}"


def _field_at(cls: Any, path: Sequence[str]) -> FieldInfo | None:
    """Returns the setting that a path leads to; None for an item of a list or a mapping."""
    for key in path[:-1]:
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if key in kinds:  # others are numbers and keys on the way
            cls = _section_in(kinds[key])
            if cls is None:
                return None
    fields: Mapping[str, FieldInfo] = getattr(cls, "__pydantic_fields__", {})  # of a section
    return fields.get(path[-1])


def _section_at(cls: Any, path: Sequence[str]) -> Any:
    """Returns the section that a path leads to; numbers and keys on the way are passed by."""
    for key in path:
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        cls = _section_in(kinds.get(key)) or cls
    return cls


def _section_in(kind: Any) -> Any:
    """Returns the section that a type is or holds, as ``list[Section]`` does, or None."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    return next((section for arg in get_args(kind) if (section := _section_in(arg))), None)


@dataclass(frozen=True)
class Option:
    """Is one setting of a tree, with its type and its default as a user writes them."""

    path: str
    type: str
    default: str
    description: str


def options(cls: Any, prefix: str = "") -> Iterator[Option]:
    """Yields all settings of the tree ``cls``, in the order of their definition."""
    for field in dataclasses.fields(cls):
        path = prefix + field.name
        description = " ".join(_described(cls, field.name).split())
        inner = _section_in(field.type)
        if inner is not None and inner is field.type:
            yield from options(inner, path + ".")
            continue
        default = _default(cls.__pydantic_fields__[field.name])
        yield Option(path, _type_name(field.type), default, description)
        if inner is not None:
            optional = isinstance(field.type, UnionType)
            yield from options(inner, path + ("." if optional else ".*."))


def _described(cls: Any, name: str) -> str:
    """Returns a field's text in the ``Attributes:`` part of a dataclass's docstring."""
    attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    match = re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", attributes, re.MULTILINE)
    return match.group(1) if match else ""


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    text = re.sub(r"\b(\w+\.)+(?=\w)", "", str(kind))  # names without their modules
    return re.sub(
        r"Literal\[(.*?)\]", lambda match: match[1].replace("'", "").replace(", ", " | "), text
    )


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if value == "":
        return "empty"
    if isinstance(value, list) and any(dataclasses.is_dataclass(item) for item in value):
        return f"{len(value)} with default settings"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns the whole tree as plain data, of which ``from_mapping`` makes an equal tree."""
    data: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return data


def to_yaml(config: Any) -> str:
    """Returns the whole tree as YAML; reading it back gives an equal tree."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False)
