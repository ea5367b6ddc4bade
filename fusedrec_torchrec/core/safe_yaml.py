"""Reads YAML that somebody else wrote: plain data, of no more than what is written there.

Tags are refused: what YAML itself tells apart by the look of it is all that our files have.
Aliases are fine, as long as what they stand for does not grow without end.
"""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

__all__ = ["parse_yaml", "read_yaml"]

LARGEST = 64 << 20  # bytes of a file
MOST_WITH_ALIASES = 100_000  # nodes of a document, if aliases make it larger than it is written
LONGEST_NUMBER = 100  # characters
NUMBERS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))


def read_yaml(path: Path) -> Any:
    """Returns what a YAML file holds, None if it is empty.

    Raises:
        ValueError: it cannot be read, or is not plain YAML; with the file, and the line if there
            is one to blame.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ValueError(f"{path} has {size} bytes, may have {LARGEST}")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return parse_yaml(content, str(path))


def parse_yaml(content: bytes | str, source: str) -> Any:
    """Returns what a text of YAML holds.

    Raises:
        ValueError: it is not plain YAML; ``source`` is where it comes from.
    """
    try:
        loader = _Loader(content)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"{source} is not valid YAML: it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        what = error.problem or error.context
        raise ValueError(f"{source}{where} is not valid YAML: {what}") from None
    except (yaml.YAMLError, ValueError) as error:  # of dates and of digits, too
        raise ValueError(f"{source} is not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """Refuses tags, and aliases that make a document too large."""

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ConstructorError(None, None, f"the tag {tag!r} is not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None:
            sizes: dict[int, int] = {}
            size = _size(node, sizes)
            if len(sizes) < size > MOST_WITH_ALIASES:
                raise ConstructorError(
                    None,
                    None,
                    f"aliases make it {size} values large, must be {MOST_WITH_ALIASES} at most",
                    node.start_mark,
                )
        return node


def _size(node: Node, sizes: dict[int, int]) -> int:
    """Counts nodes, those behind an alias as often as it stands there."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ConstructorError(None, None, "an alias is part of itself", node.start_mark)
        return sizes[id(node)]
    sizes[id(node)] = 0  # under way
    size = 1
    if isinstance(node, ScalarNode):
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise ConstructorError(None, None, "a number is too long", node.start_mark)
    elif isinstance(node, MappingNode):
        size += sum(_size(key, sizes) + _size(value, sizes) for key, value in node.value)
    elif isinstance(node, CollectionNode):
        size += sum(_size(item, sizes) for item in node.value)
    sizes[id(node)] = size
    return size
