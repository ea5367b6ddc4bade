"""A rank that hangs or dies is named on all ranks, with the stage that waits for it."""

import os
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fusedrec_torchrec as fr
from fusedrec_torchrec.core import lost_rank
from fusedrec_torchrec.core.lost_rank import LostRankError, _Incident
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.exchange.output_dist import _RowExchange
from fusedrec_torchrec.replicas.sync import GradientSync
from fusedrec_torchrec.training.metrics import ClickSums
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.parity import train_step
from tests.training.runs import small, train

HOT = (Table("a", 50, hot=(0, 1, 2)), Table("b", 33, dim=16))
OWNED = (
    Table("a", 50, sharding="fused_table_wise"),
    Table("b", 33, dim=16, sharding="fused_column_wise"),
)
GROUPED = (Table("a", 50), Table("b", 33, dim=16))
KINDS = {"requesters pool": HOT, "owners pool": OWNED}
SLOW = pytest.mark.slow
PLACES: dict[str, tuple[type, str]] = {
    "rows": (FusedLookup, "forward"),
    "gradients": (_RowExchange, "send_gradients"),
    "hot sync": (GradientSync, "_send"),
}


def case_of(ranks: int, tables: tuple[Table, ...] = HOT, **changes: Any) -> Case:
    return Case(
        tables=tables,
        batch_sizes=(5,) * ranks,
        optimizer="rowwise_adagrad",
        lengths=(1, 2, 4),
        **changes,
    )


def hang_until_others_gave_up() -> None:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["others gave up"], timedelta(seconds=60))


def happening_at(stage: str, happens: Callable[[], None]) -> Any:
    """Returns a context in which something happens to this rank before it comes to a stage."""
    owner, name = PLACES[stage]
    original = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        happens()
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, late)


def error_of(case: Case, stage: str, hangs: int) -> str:
    """One good step, then a rank does not come to a stage of the next one."""
    model: Any = sharded(case)
    train_step(case, model, 0)
    patches: Any = nullcontext()
    if dist.get_rank() == hangs and stage in PLACES:
        patches = happening_at(stage, hang_until_others_gave_up)
    try:
        with patches:
            if dist.get_rank() == hangs and stage in ("ids", "2D sync"):
                hang_until_others_gave_up()
            if stage != "2D sync":
                for step in range(1, 4):
                    train_step(case, model, step)
                    if stage == "hot sync":
                        model.state_dict()  # wants the hot rows as they are now
            else:
                model.sync()
    except LostRankError as error:
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().set("others gave up", "1")
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("requesters pool", "ids"),
        ("requesters pool", "gradients"),
        pytest.param("requesters pool", "rows", marks=SLOW),
        pytest.param("requesters pool", "hot sync", marks=SLOW),
        pytest.param("owners pool", "ids", marks=SLOW),
        ("owners pool", "rows"),
        pytest.param("owners pool", "gradients", marks=SLOW),
    ],
)
def test_a_rank_that_hangs_is_named_with_the_stage(kind: str, stage: str) -> None:
    ranks = 3 if stage == "ids" else 2
    cluster = Cluster(ranks, timeout=2)
    try:
        found = cluster.run(error_of, case_of(ranks, KINDS[kind]), stage, 1)
    finally:
        cluster.stop(kill=True)
    assert len(set(found)) == 1  # also on the rank that hung, when it comes back
    others = "rank 0" if ranks == 2 else "ranks 0, 2"
    assert found[0].startswith(
        f"stage {stage!r}: rank 1 did not answer in time; {others} waited for it"
    )
    assert "launch.timeout_seconds" in found[0]


@SLOW
@pytest.mark.parametrize("tables", [GROUPED, OWNED], ids=KINDS)
def test_a_group_that_waits_for_its_replica(tables: tuple[Table, ...]) -> None:
    cluster = Cluster(2, timeout=2)
    case = case_of(2, tables, grid=fr.GridOptions(sharding_group_size=1, sync_every=1))
    try:
        found = cluster.run(error_of, case, "2D sync", 1)
    finally:
        cluster.stop(kill=True)
    assert len(set(found)) == 1
    assert found[0].startswith("stage '2D sync': rank 1 did not answer in time")


def stop_for_a_while(case: Case) -> str:
    """Rank 1 is stopped before a step, and goes on when rank 0 has given up."""
    model: Any = sharded(case)
    train_step(case, model, 0)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    listen = _Incident._listen

    def go_on(incident: _Incident) -> Any:
        os.kill(pids[1], signal.SIGCONT)
        return listen(incident)

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with (
            mock.patch.object(_Incident, "_listen", go_on),
            mock.patch.object(lost_rank, "_grace", return_value=60.0),  # until it has come
        ):
            train_step(case, model, 1)
    except LostRankError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("kind", ["requesters pool", pytest.param("owners pool", marks=SLOW)])
def test_a_rank_that_was_stopped_is_named_with_what_to_do(kind: str) -> None:
    cluster = Cluster(2, timeout=5)
    try:
        found = cluster.run(stop_for_a_while, case_of(2, KINDS[kind]))
    finally:
        cluster.stop(kill=True)
    assert len(set(found)) == 1
    # Mostly gloo tells the late rank that its connection is gone; sometimes it times out, too.
    assert re.match(
        r"stage 'ids': (rank 1 did not answer in time and came when rank 0 had given up|"
        r"all ranks are there, but each waited in vain for another one)\. A rank that does not "
        r"answer hangs, is stopped or swapped out, or is in another collective: look at",
        found[0],
    )
    assert "?" not in found[0] and "launch.timeout_seconds" in found[0]


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(case: Case, stage: str, folder: str) -> None:
    """Rank 1 is killed before it comes to a stage of the second step."""
    model = sharded(case)
    train_step(case, model, 0)
    patches: Any = nullcontext()
    if dist.get_rank() == 1:
        if stage == "ids":
            kill_this_rank()
        patches = happening_at(stage, kill_this_rank)
    try:
        with patches:
            train_step(case, model, 1)
    except LostRankError as error:
        (Path(folder) / str(dist.get_rank())).write_text(str(error))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("requesters pool", "ids"),
        pytest.param("requesters pool", "gradients", marks=SLOW),
        pytest.param("owners pool", "ids", marks=SLOW),
        pytest.param("owners pool", "rows", marks=SLOW),
        ("owners pool", "gradients"),
    ],
)
def test_a_rank_that_dies_is_named_at_once(tmp_path: Path, kind: str, stage: str) -> None:
    """Long before the timeout."""
    cluster = Cluster(3, timeout=50)
    try:
        with pytest.raises(AssertionError, match="rank 1 died"):
            cluster.run(die, case_of(3, KINDS[kind]), stage, str(tmp_path))
        texts = {(tmp_path / name).read_text() for name in ("0", "2") if (tmp_path / name).exists()}
    finally:
        cluster.stop(kill=True)
    assert len(texts) == 1
    assert texts.pop().startswith(
        f"stage {stage!r}: rank 1 is gone: its connection broke; ranks 0, 2"
    )


def error_of_a_run(data: dict[str, Any]) -> str:
    """A rank hangs where no exchange is: before the metrics of all ranks are added up."""
    original = ClickSums.compute

    def late(sums: ClickSums) -> dict[str, float]:
        if dist.get_rank() == 1:
            hang_until_others_gave_up()
        return original(sums)

    try:
        with mock.patch.object(ClickSums, "compute", late):
            train(data)
    except LostRankError as error:
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().set("others gave up", "1")
        return str(error)
    return "nothing happened"


@SLOW
def test_a_rank_that_hangs_outside_the_exchange_is_named(tmp_path: Path) -> None:
    data = small(tmp_path, eval_every=0, launch={"timeout_seconds": 2})
    cluster = Cluster(2, timeout=2)
    try:
        found = cluster.run(error_of_a_run, data)
    finally:
        cluster.stop(kill=True)
    assert found[0].startswith("stage 'dense part': rank 1 did not answer in time"), found
    assert len(set(found)) == 1
