"""YAML files are plain data, whoever wrote them."""

from pathlib import Path

import pytest

from fusedrec_torchrec.core.config import load_yaml, with_overrides
from fusedrec_torchrec.core.safe_yaml import parse_yaml
from fusedrec_torchrec.sharding.plan_file import read_plan

TAGS = [
    "!!python/object/apply:os.system [x]",
    "!!python/name:os.system",
    "!!binary aGVsbG8=",
    "!!set {a}",
    "!!str 3",
    "!mine x",
    "! x",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("read", [load_yaml, read_plan])
def test_tags_are_refused_with_file_and_line(tmp_path: Path, tag: str, read: object) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(f"version: 1\nranks: 2\ntables: {tag}\n")
    with pytest.raises(ValueError, match=r"it\.yaml, line 3, column 9 is not valid YAML: the tag"):
        read(path)  # type: ignore[operator]


def laughs(levels: int, one: str) -> str:
    more = (f"a{n}: &a{n} " + one.format(f"*a{n - 1}") for n in range(1, levels))
    return "\n".join(["a0: &a0 {x: 1}", *more])


@pytest.mark.parametrize("one", ["[{0}, {0}, {0}, {0}, {0}]", "{{<<: [{0}, {0}, {0}, {0}, {0}]}}"])
def test_aliases_do_not_grow_without_end(tmp_path: Path, one: str) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(laughs(60, one))
    with pytest.raises(ValueError, match=r"it\.yaml, line 1, .*: aliases make it \d+ values large"):
        load_yaml(path)
    path.write_text(laughs(4, one))
    assert len(load_yaml(path)) == 4


PROBLEMS = {
    "a: &x [*x]": "line 1, column 4 is not valid YAML: an alias is part of itself",
    "a: [": "line 1, column 5 is not valid YAML",
    "b: 1\na: *x": "line 2, column 4 is not valid YAML: found undefined alias",
    "a: " + "9" * 5000: "a number is too long",
    "a: 1" + ":1" * 5000: "a number is too long",
    "a: 2020-13-45": "is not valid YAML",
    "a: " + "[" * 20_000: "nested too deeply",
    "? [a]\n: 1": "is not valid YAML",
    "a: 1\n---\nb: 2": "is not valid YAML",
    "a: \x00": "is not valid YAML",
}


@pytest.mark.parametrize("content", PROBLEMS, ids=lambda content: repr(content[:20]))
def test_what_is_wrong_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=PROBLEMS[content]) as caught:
        load_yaml(path)
    assert str(caught.value).startswith(str(path)) and len(str(caught.value)) < 1000


def test_plain_yaml_is_read() -> None:
    text = "a: &x {n: 1_000, f: .5}\nb: {<<: *x, t: 'yes', d: 2020-01-02}\nc: [true, null, *x]"
    found = parse_yaml(text, "text")
    assert found["b"]["n"] == 1000 and found["c"] == [True, None, {"n": 1000, "f": 0.5}]
    assert parse_yaml("", "text") is None


def test_overrides_have_no_tags_either() -> None:
    with pytest.raises(ValueError, match="override 'a=!!python/name:eval', line 1"):
        with_overrides({}, ["a=!!python/name:eval"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ValueError, match=r"it\.yaml is not valid YAML"):
        load_yaml(path)
