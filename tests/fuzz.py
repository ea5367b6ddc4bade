"""Damages files at random and reads them: only ``ValueError`` may come of it, with the file's name.

The tests run a little of it.  For more:

    python -m tests.fuzz --seconds 600
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.checkpoint.manifest import read_manifest
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.sharding.plan_file import read_plan, shards_of
from fusedrec_torchrec.training.data.vocabulary import read_vocabulary
from fusedrec_torchrec.training.run_state import read_run_state
from tests.hostile import small_checkpoint, unchanged

CLUSTER = Path(__file__).parents[1] / "configs" / "clusters" / "cpu_ethernet.yaml"
TOKENS = (
    *(bytes([code]) for code in b"()]}Rbut.0NQ|>%\n\t\0\x81\x85\x86\x94"),
    *(b"h\0", b"h\1", b"j\0\0\0\0", b"q\0", b"\x8c\1a", b"K\xff", b"\xff\xff\xff\x7f"),
    *(b"cos\nsystem\n", b"cpathlib\nPath\n", b"cbuiltins\ngetattr\n", b"../", b"/"),
    *(b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"\xff" * 8, b"-1", b"9999999999999999999"),
    *(b"null", b"true", b"NaN", b"1e999", b"[", b"{", b'"', b"\\ud800", b": ", b"- "),
    *(b"!!python/name:os.system ", b"<<: ", b"? ", b"&a ", b"*a", b"\x1b[31m", b"\xc3\xa9"),
)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """One to four changes of any kind."""
    result = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(result) + 1)
        span = min(chance.choice((1, 1, 2, 4, 8, 64)), len(result) - at)
        other = chance.randrange(len(result) + 1)
        match chance.randrange(7):
            case 0 if span:
                result[at] ^= 1 << chance.randrange(8)
            case 1 if span:
                result[at : at + span] = chance.randbytes(span)
            case 2:
                del result[at : at + span]
            case 3:
                result[at:at] = chance.choice(TOKENS)
            case 4:
                result[at : at + span] = result[other : other + span]
            case 5:
                result[at:at] = result[other : other + span]
            case 6 if chance.random() < 0.2:
                del result[at:]
    return bytes(result)


def read_tensors(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for name in reader.tensors:
        reader.whole(name)
    for name in reader.objects:
        reader.object(name)


def read_planned(folder: Path) -> None:
    plan, _ = read_plan(folder / "plan.yaml")
    for name, table in plan.tables.items():
        try:
            shards_of(name, table, table.rows, table.columns, 2)
        except ValueError as error:  # the plan may come from anywhere
            raise ValueError(f"{folder}: {error}") from None


def read_cluster(folder: Path) -> None:
    path = folder / "cluster.yaml"
    from_mapping(ClusterConfig, load_yaml(path), str(path))


def verify_all(folder: Path) -> None:
    if problems := verify(folder):
        raise ValueError(f"{folder}: {problems[0]}")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "metadata": (".metadata", read_tensors),
    "data": ("__0_0.distcp", read_tensors),
    "verified data": ("__0_0.distcp", verify_all),
    "manifest": ("manifest.json", read_manifest),
    "run": ("run.json", read_run_state),
    "plan": ("plan.yaml", read_planned),
    "cluster": ("cluster.yaml", read_cluster),
    "hot set": ("hot_rows.npz", lambda folder: HotSet.load(folder / "hot_rows.npz")),
    "profile": ("profile.npz", lambda folder: AccessProfile.load(folder / "profile.npz")),
    "vocabulary": ("words.npy", lambda folder: read_vocabulary(folder / "words.npy")),
}


def make_files(folder: Path) -> Path:
    """One of each kind."""
    small_checkpoint(folder)
    shutil.copy(CLUSTER, folder / "cluster.yaml")
    np.save(folder / "words.npy", np.arange(50, dtype=np.uint32))
    AccessProfile(
        table_rows={"a": 6, "b": 9},
        samples=20,
        accesses={"a": 20, "b": 7},
        ids={"a": np.array([2, 3]), "b": np.array([0])},
        counts={"a": np.array([9, 4]), "b": np.array([7])},
        error=0,
        counters=8,
    ).save(folder / "profile.npz")
    return folder


def fuzz_once(folder: Path, kind: str, seed: int) -> bool:
    """Returns whether a damaged file was refused; the folder is as it was before.

    Raises:
        Exception: it was neither read nor refused in the right way.
    """
    file, read = READERS[kind]
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(damaged(content, random.Random(f"{kind} {seed}")))
    try:
        with unchanged(folder):
            read(folder)
    except ValueError as error:
        message = str(error)
        if type(error) is not ValueError or str(folder) not in message or len(message) > 20_000:
            raise
        return True
    finally:
        (folder / file).write_bytes(content)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first damage")
    parser.add_argument("--kind", choices=READERS, action="append")
    arguments = parser.parse_args()
    refused, done, failed = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_files(Path(temporary) / "files")
        end, seed = time.monotonic() + arguments.seconds, arguments.seed
        while time.monotonic() < end:
            for kind in arguments.kind or READERS:
                done[kind] += 1
                try:
                    refused[kind] += fuzz_once(folder, kind, seed)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    failed[kind] += 1
                    print(f"{kind}, seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            seed += 1
    for kind, count in done.items():
        print(f"{kind}: {count} files, {refused[kind]} refused, {failed[kind]} failures")


if __name__ == "__main__":
    main()
