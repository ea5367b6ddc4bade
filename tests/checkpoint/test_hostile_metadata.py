"""Metadata that wants to do more than describe a checkpoint is refused, and leaves no trace."""

import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fusedrec_torchrec.checkpoint.boxes import overlapping
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.safe_metadata import read_metadata
from fusedrec_torchrec.checkpoint.verify import verify
from tests.hostile import (
    WEIGHT,
    metadata_of,
    name,
    set_attribute,
    text,
    unchanged,
    with_prelude,
    write_metadata,
)


def refused(folder: Path, problem: str) -> None:
    with unchanged(folder), pytest.raises(ValueError, match=problem) as caught:
        read_metadata(folder)
    assert str(folder / ".metadata") in str(caught.value)


@pytest.mark.parametrize(
    ("of", "attribute"),
    [
        (("pathlib", "PosixPath"), "name"),
        (("pathlib", "Path"), "read_text"),
        (("torch.distributed.checkpoint.metadata", "Metadata"), "version"),
        (("torch.serialization", "_get_layout"), "__doc__"),
        (("collections", "OrderedDict"), "anything"),
    ],
)
def test_attributes_of_classes_and_functions_are_not_set(
    folder: Path, of: tuple[str, str], attribute: str
) -> None:
    """Even by a file that is refused for another reason, or is otherwise good."""
    change = set_attribute(name(*of), attribute, text("changed"))
    good = (folder / ".metadata").read_bytes()
    for content in (pickle.PROTO + b"\x04" + change + pickle.STOP, with_prelude(change, good)):
        (folder / ".metadata").write_bytes(content)
        refused(folder, f"it sets attributes of {'.'.join(of)}, which is no new instance")


def test_no_file_outside_of_the_folder_is_read(folder: Path, tmp_path: Path) -> None:
    """Tries it by replacing the attribute that compares its name."""
    shutil.move(folder / "__0_0.distcp", tmp_path / "elsewhere")
    content = metadata_of(folder)
    for info in content.storage_data.values():
        info.relative_path = "../elsewhere"
    change = set_attribute(name("pathlib", "PosixPath"), "name", text("../elsewhere"))
    (folder / ".metadata").write_bytes(with_prelude(change, pickle.dumps(content)))
    reader = CheckpointReader(folder)
    with unchanged(folder), pytest.raises(ValueError, match="sets attributes"):
        reader.whole(WEIGHT)
    write_metadata(folder, content)
    refused(folder, r"names '\.\./elsewhere', which is no file in its folder")


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "a\nb", None, 3, b"x", ["a"]]
)
def test_names_that_are_no_files_of_the_folder(folder: Path, path: Any) -> None:
    content = metadata_of(folder)
    next(iter(content.storage_data.values())).relative_path = path
    write_metadata(folder, content)
    refused(folder, "relative_path|which is no file in its folder")


def opcodes(*parts: bytes) -> bytes:
    return b"".join((pickle.PROTO, b"\x04", *parts, pickle.STOP))


def deep(levels: int) -> bytes:
    return opcodes(pickle.NONE, pickle.TUPLE1 * levels)


def doubled(levels: int) -> bytes:
    """A tuple that has as many leaves as two to the power of its levels."""
    step = pickle.MEMOIZE + pickle.BINGET + b"%c" + pickle.TUPLE2
    return opcodes(pickle.NONE, *(step.replace(b"%c", bytes([i])) for i in range(levels)))


PICKLES: dict[str, tuple[bytes, str]] = {
    "a function": (opcodes(name("os", "system"), text("x"), pickle.TUPLE1, pickle.REDUCE), "os"),
    "a module of ours": (
        opcodes(name("fusedrec_torchrec.core.files", "file_lock")),
        "no checkpoint needs",
    ),
    "eval": (opcodes(name("builtins", "eval")), r"builtins\.eval, which no checkpoint needs"),
    "an attribute of a name": (
        opcodes(text("pathlib"), text("Path.cwd"), pickle.STACK_GLOBAL),
        r"pathlib\.Path\.cwd, which no checkpoint needs",
    ),
    "an extension code": (opcodes(pickle.EXT1 + b"\1"), "opcode"),
    "a persistent name": (opcodes(pickle.PERSID + b"0\n"), "opcode"),
    "instances of old": (opcodes(b"(i", b"pathlib\nPath\n"), "opcode"),
    "a call of a call": (opcodes(b"))R"), "it calls what is no name"),
    "a huge place": (opcodes(pickle.NONE, pickle.LONG_BINPUT + b"\xff" * 4), "not the metadata"),
    "a huge number": (opcodes(pickle.LONG4 + b"\xff\xff\xff\x7f"), "opcode"),
    "huge bytes": (opcodes(pickle.BYTEARRAY8 + b"\xff" * 7 + b"\x7f"), "opcode"),
    "a huge text": (opcodes(pickle.BINUNICODE + b"\xff\xff\xff\x7f"), "truncated"),
    "a huge frame": (opcodes(pickle.FRAME + b"\xff" * 8), "a frame ends after its end"),
    "digits": (opcodes(b"I" + b"9" * 100_000 + b"\n"), "opcode"),
    "deep": (deep(1_000_000), "not the metadata"),
    "marks": (opcodes(pickle.MARK * 1000), "nests more than 100"),
    "doubled": (doubled(200), "not the metadata"),
    "much at once": (opcodes(pickle.MARK, pickle.NONE * (2 << 20)), "objects in one"),
    "nothing": (b"", "something is missing"),
    "too few": (opcodes(pickle.TUPLE2), "something is missing"),
    "a later protocol": (b"\x80\x09.", "protocol 9"),
    "a protocol of old": (pickle.dumps({"a": 1}, protocol=0), "opcode"),
    "another object": (pickle.dumps({"a": 1}), "not the metadata of a checkpoint"),
    "a state for a list": (opcodes(b"]}b"), "sets attributes of list"),
    "two states": (opcodes(name("torch", "Size"), b")R}b}b"), "no new instance"),
    "items of a list": (opcodes(b"]NNs"), "what is no dict"),
    "not utf-8": (opcodes(pickle.SHORT_BINUNICODE + b"\1\xff"), "damaged"),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_that_are_no_metadata(folder: Path, kind: str) -> None:
    content, problem = PICKLES[kind]
    (folder / ".metadata").write_bytes(content)
    refused(folder, problem)


def test_a_file_that_is_too_large_is_not_read(folder: Path) -> None:
    os.truncate(folder / ".metadata", 1 << 40)  # a hole: it takes no room
    refused(folder, "has 1099511627776 bytes, may have")


def change_weight(change: Callable[[TensorStorageMetadata], object]) -> Callable[[Any], object]:
    return lambda content: change(content.state_dict_metadata[WEIGHT])


def change_info(**changes: object) -> Callable[[Any], object]:
    def change(content: Any) -> None:
        index = MetadataIndex(WEIGHT, torch.Size((0, 0)))
        vars(content.storage_data[index]).update(changes)

    return change


def with_chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], object]:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
    return change_weight(lambda about: setattr(about, "chunks", chunks))


def set_field(field: str, value: object) -> Callable[[Any], object]:
    return lambda content: setattr(content, field, value)


def grow(about: TensorStorageMetadata) -> None:
    about.size = about.chunks[0].sizes = torch.Size((1 << 40, 4))


def store_twice(content: Any) -> None:
    """A dict of Python's cannot hold a key twice, a pickle can."""
    first, second = (MetadataIndex(WEIGHT, torch.Size(at)) for at in ((0, 0), (9, 9)))
    content.storage_data[second] = content.storage_data[first]
    object.__setattr__(second, "offset", first.offset)


FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "overlap": (with_chunks(((0, 0), (4, 4)), ((2, 0), (2, 4))), "overlap"),
    "the same twice": (with_chunks(((0, 0), (3, 4)), ((0, 0), (3, 4))), "overlap"),
    "outside": (with_chunks(((4, 0), (4, 4))), r"has a chunk of sizes \[4, 4\] at \[4, 0\]"),
    "another dimension": (with_chunks(((0,), (6,))), "has a chunk of sizes"),
    "negative": (with_chunks(((-1, 0), (6, 4))), "must be a whole number"),
    "huge": (change_weight(lambda a: setattr(a, "size", torch.Size((1 << 40, 1 << 40)))), "more"),
    "not stored": (change_weight(grow), "which is stored in"),
    "a size that is none": (change_weight(lambda a: setattr(a, "size", (6, 4))), "torch.Size"),
    "chunks that are none": (change_weight(lambda a: setattr(a, "chunks", ())), "list of chunks"),
    "a type that is none": (change_weight(lambda a: setattr(a.properties, "dtype", 3)), "type"),
    "sparse": (
        change_weight(lambda a: setattr(a.properties, "layout", torch.sparse_coo)),
        "not torch.strided",
    ),
    "a flag that is none": (
        change_weight(lambda a: setattr(a.properties, "pin_memory", 2)),
        "must be true or false",
    ),
    "negative offset": (change_info(offset=-1), "whole number of 0 or more"),
    "negative length": (change_info(length=-1), "whole number of 0 or more"),
    "a length that is none": (change_info(length=True), "whole number of 0 or more"),
    "a place of another": (change_info(offset=1), "two things are stored in __0_0.distcp"),
    "in two places": (store_twice, "is stored twice"),
    "an unknown field": (change_info(codec="zip"), "has the field 'codec', must have"),
    "transforms that are none": (change_info(transform_descriptors=3), "is no list"),
    "planner data of others": (set_field("planner_data", {"a": [1]}), "no path of names"),
    "a version that is none": (set_field("version", ["x"]), "must be a printable text"),
    "no storage": (set_field("storage_data", None), "storage_data is no dict"),
    "other storage": (set_field("storage_data", {1: 2}), "must be a MetadataIndex"),
    "ordered storage": (set_field("storage_data", OrderedDict()), "storage_data is no dict"),
    "no tensors": (set_field("state_dict_metadata", []), "state_dict_metadata is no dict"),
    "names": (set_field("state_dict_metadata", {3: None}), "must be a printable text"),
    "escapes": (set_field("state_dict_metadata", {"\x1b[31m": None}), "printable text"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_is_checked(folder: Path, kind: str) -> None:
    change, problem = FIELDS[kind]
    content = metadata_of(folder)
    change(content)
    write_metadata(folder, content)
    refused(folder, problem)


def test_a_gap_behind_an_overlap_is_not_read_as_numbers(folder: Path) -> None:
    """Chunks with as many elements as the tensor, of which some are there twice."""
    content = metadata_of(folder)
    about = content.state_dict_metadata[WEIGHT]
    info = content.storage_data.pop(MetadataIndex(WEIGHT, torch.Size((0, 0))))
    about.chunks = []
    for row in (0, 1, 2):  # rows 0 to 3: the last two are missing
        at, size = torch.Size((row, 0)), torch.Size((2, 4))
        about.chunks.append(ChunkStorageMetadata(at, size))
        content.storage_data[MetadataIndex(WEIGHT, at)] = info
    write_metadata(folder, content)
    refused(folder, "overlap")
    (folder / "manifest.json").unlink()
    assert len(problems := verify(folder)) == 1 and "overlap" in problems[0]


def test_missing_elements_are_missed(folder: Path) -> None:
    content = metadata_of(folder)
    content.state_dict_metadata[WEIGHT].size = torch.Size((1 << 50, 4))
    write_metadata(folder, content)
    reader = CheckpointReader(folder)
    with pytest.raises(ValueError, match=f"24 of {1 << 52} elements of {WEIGHT} are in the"):
        reader.whole(WEIGHT)  # before so much is allocated
    with pytest.raises(ValueError, match="4 of 8 elements"):
        reader.read(WEIGHT, (5, 0), torch.empty(2, 4))
    (folder / "manifest.json").unlink()
    assert f"{WEIGHT} has 24 of {1 << 52} elements" in verify(folder)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_that_overlap_are_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes = []
    for _ in range(int(torch.randint(2, 9, (), generator=generator))):
        numbers = torch.randint(0, 6, (2, 3), generator=generator)
        boxes.append((numbers[0].tolist(), numbers[1].tolist()))
    count = torch.zeros(12, 12, 12, dtype=torch.int64)
    for offsets, sizes in boxes:
        ranges = [slice(o, o + s) for o, s in zip(offsets, sizes, strict=True)]
        count[tuple(ranges)] += 1
    assert (overlapping(boxes) is not None) == bool((count > 1).any())


def test_shards_of_all_shapes_do_not_overlap() -> None:
    grid = [((r * 3, c * 4), (3, 4)) for r in range(50) for c in range(50)]
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    for boxes in (grid, pinwheel, [((0, 0), (0, 4))] * 3, [((), ())]):
        assert overlapping(boxes) is None
    assert overlapping([((), ()), ((), ())]) is not None
    crossed = [((i, 0), (5000, 1)) for i in range(5000)]
    assert overlapping(crossed) == "5000 chunks lie across each other"
