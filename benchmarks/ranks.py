"""Starts ranks on this machine, and puts tables into documents, for the scripts here."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["on_ranks", "one_by_one", "put_into", "write_into"]


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function on ranks of a gloo group; returns what rank 0 has, by way of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, (ranks, Path(folder), function, arguments), nprocs=ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def one_by_one(
    train: Callable[..., dict[str, float]], folder: Path, runs: Sequence[Any], epochs: int
) -> list[dict[str, float]]:
    """Returns a result for each run on this rank; rank 0 tells which one it is at."""
    results = []
    for number, run in enumerate(runs):
        if dist.get_rank() == 0:
            print(f"{number + 1} of {len(runs)}: {', '.join(map(str, run))}", flush=True)
        results.append(train(folder, run, epochs))
    return results


def _rank_main(
    rank: int, ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    result = function(*arguments)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def write_into(document: Path, name: str, text: str) -> None:
    """Puts a text between the markers of a document."""
    try:
        document.write_text(put_into(document.read_text(), name, text))
    except ValueError as error:
        raise ValueError(f"{document}: {error}") from None


def put_into(whole: str, name: str, text: str) -> str:
    """Returns a document's text with another text between its markers.

    Raises:
        ValueError: the markers are not there, or more than once.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise ValueError(f"must have {begin!r} and {end!r} once each")
    before, after = whole.split(begin)[0], whole.split(end)[1]
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
