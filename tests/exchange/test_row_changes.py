"""What counts as a change of rows that were sent early."""

from fusedrec_torchrec.exchange.row_changes import RowChanges


class Batch:
    """Stands in for what a rank remembers of a batch."""


def test_the_batch_that_is_expected_changes_nothing_that_was_sent() -> None:
    changes, batch = RowChanges(), Batch()
    changes.expect(batch)
    changes.update(batch)
    assert changes.count == 0


def test_other_batches_and_loaded_states_do() -> None:
    changes, batch = RowChanges(), Batch()
    changes.update(batch)  # nobody has sent anything yet
    changes.expect(batch)
    changes.update(Batch())
    changes.overwrite()
    assert changes.count == 3


def test_a_batch_that_is_gone_is_not_taken_for_another() -> None:
    changes, batch = RowChanges(), Batch()
    changes.expect(batch)
    del batch
    changes.update(Batch())
    assert changes.count == 1
