"""Writes prepared data anew with its hot samples first: FAE's preprocessing.

FAE (VLDB 2022) sorts the inputs once, before training, into those that need hot rows only and the
others.  The samples that are held out for evaluation stay where they are, at the end.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Samples, ids_by_feature
from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.training.data.file_names import LABEL, MANIFEST, WEIGHTS
from fusedrec_torchrec.training.data.parquet import write_parquet
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.prepared_files import features_of
from fusedrec_torchrec.training.data.split import split

__all__ = ["HOT_SET", "separate"]

HOT_SET = "hot_set.npz"  # in the folder: what it was sorted by

PART_SAMPLES = 1 << 20
GROUP_SAMPLES = 1 << 13
READ = 1 << 16


def separate(
    data: PreparedData, hot_set: HotSet, output: Path, held_out: float, progress: bool = True
) -> PreparedData:
    """Writes the data anew, with the hot samples to train on first.

    Args:
        data: what to write anew.
        hot_set: what is hot.
        output: a folder that is empty or not there yet.
        held_out: share of the data, at its end, that is kept for evaluation, where the data itself
            does not say which samples are.
        progress: whether to show bars.

    Raises:
        ValueError: the folder is in use, or the hot set is of other tables.
    """
    hot_set.check(data.table_rows)
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is {held_out}, must be in [0, 1)")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty, must be a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Whoever is interrupted leaves no folder that looks like the result.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        _write(data, hot_set, Path(folder), held_out, progress)
        Path(folder).chmod(0o777 & ~_umask())
        if output.exists():
            output.rmdir()
        Path(folder).rename(output)
        Path(folder).mkdir()  # for the context to remove
    return PreparedData.open(output)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(
    data: PreparedData, hot_set: HotSet, output: Path, held_out: float, progress: bool
) -> None:
    (first, train), (rest, evaluation) = split(data, held_out)
    writer = _Writer(data, output)
    hot = 0
    for wanted in (True, False):
        what = "hot samples" if wanted else "cold samples"
        for samples in _blocks(data, first, train, what, progress):
            is_hot = hot_set.hot_samples(samples, data.features.values())
            chosen = samples.take(np.flatnonzero(is_hot == wanted))
            hot += len(chosen) if wanted else 0
            writer.add(chosen)
    for samples in _blocks(data, rest, evaluation, "held-out samples", progress):
        writer.add(samples)
    parts = writer.finish()
    hot_set.save(output / HOT_SET)
    identity = {**data.manifest["identity"], "hot_samples": hot, "held_out": held_out}
    manifest = {**data.manifest, "identity": identity, "parts": parts}
    write_json(output / MANIFEST, manifest)


def _blocks(
    data: PreparedData, first: int, count: int, what: str, progress: bool
) -> Iterator[Samples]:
    with tqdm(total=count, desc=what, unit="sample", disable=not progress) as bar:
        for start in range(first, first + count, READ):
            stop = min(start + READ, first + count)
            yield data.read(start, stop)
            bar.update(stop - start)


class _Writer:
    """Writes samples to parquet files of a million each."""

    def __init__(self, data: PreparedData, output: Path) -> None:
        self._dense: list[str] = data.manifest["dense"]
        self._features = features_of(data.manifest)
        self._output = output
        self._waiting: list[Samples] = []
        self._parts: list[dict[str, Any]] = []

    def add(self, samples: Samples) -> None:
        if len(samples):
            self._waiting.append(samples)
        if sum(map(len, self._waiting)) >= PART_SAMPLES:
            self._write()

    def finish(self) -> list[dict[str, Any]]:
        if self._waiting:
            self._write()
        return self._parts

    def _write(self) -> None:
        samples = Samples.concatenate(self._waiting)
        self._waiting = []
        columns: dict[str, Any] = {LABEL: samples.labels.astype(np.int8)}
        columns |= {name: samples.dense[:, i] for i, name in enumerate(self._dense)}
        ids_F = [ids.astype(np.int32) for ids in ids_by_feature(samples, len(self._features))]
        for number, (feature, ids) in enumerate(zip(self._features, ids_F, strict=True)):
            columns[feature.name] = ids
            if feature.bag:
                assert samples.lengths is not None
                ends = np.cumsum(samples.lengths[number])
                offsets = np.concatenate([[0], ends]).astype(np.int32)
                columns[feature.name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
                if feature.weights:
                    assert samples.weights is not None
                    first = sum(map(len, ids_F[:number]))
                    weights = pa.array(samples.weights[first : first + len(ids)])
                    name = f"{feature.name}{WEIGHTS}"
                    columns[name] = pa.ListArray.from_arrays(offsets, weights)
        name = f"part-{len(self._parts):05d}.parquet"
        write_parquet(self._output / name, pa.table(columns), GROUP_SAMPLES)
        self._parts.append({"file": name, "samples": len(samples)})
