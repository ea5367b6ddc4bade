"""Several replications of the same tables: whom the exchange asks, and whom it tells."""

from collections.abc import Sequence

import pytest
import torch

from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.replication import BatchReplicas, Replication, Replications


class Index:
    """Answers no key."""

    table: torch.Tensor | None = None

    def replace(self, keys_N: torch.Tensor) -> torch.Tensor:
        return keys_N


class Batch(BatchReplicas):
    """Has no replicated rows."""

    def routed(self, *args: object) -> None: ...

    def enter(self) -> None: ...

    def look_up(self, out: torch.Tensor) -> None: ...

    def send_gradients(self, flat: torch.Tensor) -> None: ...

    def record_stream(self, stream: torch.Stream) -> None: ...


class Logged(Replication):
    """Notes in a list what it is told."""

    def __init__(self, log: list[str], title: str) -> None:
        self._log, self._title = log, title

    def note(self, what: str) -> None:
        self._log.append(f"{self._title}.{what}")

    def flush(self) -> None:
        self.note("flush")

    def purge(self) -> None:
        self.note("purge")

    def count(self, keys_U: torch.Tensor | None) -> None:
        self.note("count")


class Answering(Logged):
    """Answers keys, as hot rows do."""

    asks_first = True

    def __init__(self, log: list[str], title: str = "answering") -> None:
        super().__init__(log, title)
        self.index = Index()
        self.of_batch = Batch()

    def batch(self) -> BatchReplicas:
        return self.of_batch

    def is_stale(self) -> bool:
        return True


class Sharing(Logged):
    """Shares updates, as groups of ranks do."""

    rows = (torch.ones(2, 4),)

    def __init__(self, log: list[str], title: str = "sharing") -> None:
        super().__init__(log, title)

    def look_up(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        self.note("look_up")
        return list(self.rows)


@pytest.mark.parametrize("answering_first", [True, False])
def test_one_member_answers_keys_and_another_shares_updates(answering_first: bool) -> None:
    log: list[str] = []
    answering, sharing = Answering(log), Sharing(log)
    members = (answering, sharing) if answering_first else (sharing, answering)
    both = Replications(members)
    assert both.members == members
    assert both.index is answering.index
    assert both.batch() is answering.of_batch
    assert both.asks_first and both.is_stale()
    both.count(None)
    looked_up = both.look_up([])
    assert looked_up is not None and looked_up[0] is Sharing.rows[0]
    assert log == ["answering.count", "sharing.look_up"]


def test_all_members_hear_that_tables_are_read_or_overwritten() -> None:
    log: list[str] = []
    both = Replications([Answering(log), Sharing(log)])
    both.flush()
    both.purge()
    assert log == ["answering.flush", "sharing.flush", "answering.purge", "sharing.purge"]


def test_two_members_that_answer_keys_are_one_too_many() -> None:
    with pytest.raises(AssertionError, match="two replications answer the same keys"):
        Replications([Answering([]), Answering([])])


def test_without_members_nothing_is_replicated() -> None:
    none = Replications()
    assert none.index is None and none.batch() is None and none.look_up([]) is None
    assert not none.asks_first and not none.is_stale()
