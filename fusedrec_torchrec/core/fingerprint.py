"""Compares what all ranks must have in common, before a difference can do harm.

Ranks that were given different plans or options would train on without a word, each by its own
arithmetic.  So before a module is sharded, every rank writes down what it was given as *facts*, one
line of text for each setting, and all compare a hash of them: 32 bytes, once.  Only if hashes
differ do the facts themselves travel, and every rank raises the same error, which names what
differs, and on which ranks.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.all_ranks import gather_from_all_ranks, listed_ranks
from fusedrec_torchrec.core.lost_rank import wait

__all__ = ["Facts", "check_same_on_all_ranks", "facts_of"]

Facts = dict[str, str]

SHOWN_LENGTH = 120  # characters of a fact in an error message
SHOWN_FACTS = 5
SHOWN_NUMBERS = 16
HASH_BYTES = 32
PLAIN = (bool, int, complex, str, bytes)
DEEPEST = 4  # objects in objects whose settings are written down


def facts_of(name: str, value: Any) -> Facts:
    """Writes down a value, setting by setting; what is None is left out.

    Args:
        name: of the value; the names of its settings follow it.
        value: a dataclass, a mapping or anything that ``_text`` can write down.
    """
    return dict(_facts(name, value))


def _facts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if value is None:
        return
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _facts(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _facts(f"{name}.{key}", value[key])
    else:
        yield name, _text(value)


def _text(value: Any, depth: int = 0) -> str:
    """Returns the same text for the same value on every rank, so without addresses of objects.

    Numbers are the same if they are equal.  Paths may differ from machine to machine; what is in
    the files is compared by who reads them.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(float(value))
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if depth > DEEPEST:
        return type(value).__qualname__
    inner = partial(_text, depth=depth + 1)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return "a file"
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {list(value.shape)}"
        if value.is_meta or value.layout != torch.strided:
            return f"{kind} on {value.device.type}"
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{kind} (sha256 {hashlib.sha256(content.tobytes()).hexdigest()[:12]})"
    if isinstance(value, np.ndarray) and value.size <= SHOWN_NUMBERS:
        return f"{value.tolist()}"
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{value.size} numbers (sha256 {digest[:12]})"
    if isinstance(value, partial):
        return f"{inner(value.func)}{inner(value.args)}{inner(value.keywords)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {inner(value[k])}" for k in sorted(value, key=str)) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(inner, value)) + "]"
    if isinstance(value, torch.device):
        return value.type  # its number is that of a rank on a machine
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return inner({field.name: getattr(value, field.name) for field in fields(value)})
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    # An object of a class that we do not know: its settings are its attributes.
    return f"{type(value).__qualname__}{inner(getattr(value, '__dict__', {}))}"


def check_same_on_all_ranks(
    what: str, facts: Mapping[str, str], pg: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compares facts with those of all other ranks; all ranks of the group must call it.

    Args:
        what: what the facts are about, for the error.
        facts: those of this rank.
        pg: the process group; all ranks if None.
        device: on which collectives run.

    Raises:
        ValueError: on all ranks, naming what differs on which of them.
    """
    if not dist.is_initialized() or dist.get_world_size(pg) == 1:
        return
    if len(set(_hashes(facts, pg, device))) == 1:
        return
    shown = {name: _shown(text) for name, text in facts.items()}
    raise ValueError(_difference(what, gather_from_all_ranks(shown, pg)))


def _hashes(
    facts: Mapping[str, str], pg: dist.ProcessGroup | None, device: torch.device
) -> list[bytes]:
    """Returns the hash of every rank's facts, in rank order."""
    digest = hashlib.sha256()
    for name, text in facts.items():
        digest.update(f"{name}\0{text}\0".encode())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)
    every = own.new_empty(dist.get_world_size(pg) * HASH_BYTES)
    work = dist.all_gather_single(every, own, group=pg, async_op=True)
    wait(work, pg, "sharding")
    content = bytes(every.cpu().tolist())
    return [content[i : i + HASH_BYTES] for i in range(0, len(content), HASH_BYTES)]


def _shown(text: str) -> str:
    """Returns a fact as an error shows it; cut ones are told apart by a hash."""
    if len(text) <= SHOWN_LENGTH:
        return text
    return f"{text[:SHOWN_LENGTH]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _difference(what: str, facts_by_rank: Sequence[Mapping[str, str]]) -> str:
    names = dict.fromkeys(name for facts in facts_by_rank for name in facts)
    differences = []
    for name in names:
        ranks_of: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            ranks_of.setdefault(facts.get(name), []).append(rank)
        if len(ranks_of) > 1:
            values = " and ".join(_value_on_ranks(*item) for item in ranks_of.items())
            differences.append(f"{name} is {values}")
    if not differences:  # the same facts, told in another order
        differences = ["the order of " + ", ".join(list(names)[:SHOWN_FACTS])]
    more = f"; and {len(differences) - SHOWN_FACTS} more" if len(differences) > SHOWN_FACTS else ""
    return (
        f"ranks do not agree about {what}: {'; '.join(differences[:SHOWN_FACTS])}{more}. All ranks "
        "must be given the same model, plan, options, optimizer settings and versions"
    )


def _value_on_ranks(text: str | None, ranks: Sequence[int]) -> str:
    shown = "not given" if text is None else text
    return f"{shown} on {listed_ranks(ranks)}"
