"""A library is used only if it is whole and fits; a build replaces it at once or not at all."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusedrec_torchrec.core.native import library as library_file
from fusedrec_torchrec.core.native.library import (
    BuildError,
    Library,
    UnusableLibraryError,
    identity,
)
from tests.core.native.compiler import cached, needs_operators, quick_compiler

pytestmark = needs_operators


def truncate(library: Library) -> None:
    os.truncate(library.path, library.path.stat().st_size // 2)


def empty(library: Library) -> None:
    library.path.write_bytes(b"")


def change_a_byte(library: Library) -> None:
    content = bytearray(library.path.read_bytes())
    content[len(content) // 2] ^= 1
    library.path.write_bytes(content)


def remove_the_library(library: Library) -> None:
    library.path.unlink()


def remove_the_manifest(library: Library) -> None:
    library.manifest.unlink()


def truncate_the_manifest(library: Library) -> None:
    os.truncate(library.manifest, 10)


def change_the_kind_of_manifest(library: Library) -> None:
    library.manifest.write_text("[1, 2]")


def come_from_another_torch(library: Library) -> None:
    manifest = json.loads(library.manifest.read_text())
    library.manifest.write_text(json.dumps(manifest | {"identity": "other", "torch": "1.2.3"}))


DAMAGES = [
    (truncate, "bytes instead of"),
    (empty, "has 0 bytes instead of"),
    (change_a_byte, "is damaged: its SHA-256 is not"),
    (remove_the_library, r"fusedrec_ops\.so does not exist"),
    (remove_the_manifest, r"fusedrec_ops\.json does not exist"),
    (truncate_the_manifest, r"fusedrec_ops\.json is damaged"),
    (change_the_kind_of_manifest, r"fusedrec_ops\.json is damaged"),
    (come_from_another_torch, r"was built for torch 1\.2\.3"),
]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A good copy, with a compiler that could build it anew."""
    for name, value in quick_compiler(tmp_path).items():
        monkeypatch.setenv(name, value)
    return cached(tmp_path)


def test_a_whole_library_is_usable(library: Library) -> None:
    library.check()


@pytest.mark.parametrize(
    ("damage", "text"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES]
)
def test_damage_is_found_and_a_build_mends_it(
    library: Library, damage: Callable[[Library], None], text: str
) -> None:
    damage(library)
    with pytest.raises(UnusableLibraryError, match=text):
        library.check()
    library.build()
    library.check()


def test_a_failed_build_leaves_what_was_there(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'ops.cpp:1: error: no such luck' >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(BuildError, match=r"failing failed with status 3: ops\.cpp:1: error"):
        library.build()
    library.check()
    assert sorted(path.name for path in library.folder.iterdir()) == [
        "fusedrec_ops.json",
        "fusedrec_ops.so",
    ]


def test_a_build_removes_what_a_killed_one_left(library: Library) -> None:
    (library.folder / "build.killed").mkdir()
    (library.folder / "build.killed" / "fusedrec_ops.so").write_bytes(b"half")
    library.build()
    assert not (library.folder / "build.killed").exists()


def test_the_compiler_may_come_with_arguments(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{tmp_path / 'compiler'} -an_argument")
    library.build()
    library.check()


def test_a_compiler_that_is_not_there_is_named(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no_such_compiler")
    with pytest.raises(BuildError, match="CXX is 'no_such_compiler', which is no program"):
        library.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"there is no C\+\+ compiler"):
        library.build()


def test_the_identity_changes_with_all_that_a_library_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = {identity()}

    def another() -> None:
        identities.add(identity.__wrapped__())

    with monkeypatch.context() as patch:
        patch.setattr(library_file, "FLAGS", ("-O2",))
        another()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.2.3")
        another()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
        another()
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "abacus")
        another()
    for path in [library_file.SOURCE, *library_file.SOURCE.parent.glob("*.h")]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(library_file, "SOURCE", tmp_path / "ops.cpp")
        assert identity.__wrapped__() == identity()  # wherever the sources are
        (tmp_path / "checks.h").write_text("// other checks")
        another()
    assert len(identities) == 6
