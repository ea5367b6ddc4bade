"""Tells dedup and fusion apart: distinct rows table by table, and in one exchange.

Both systems send the same rows and gradients.  What differs is in how many messages, and what
becomes of it: the bandwidth that the messages reach by themselves, and the time of a step.
"""

from dataclasses import dataclass
from statistics import median

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.statistics import Ratio, paired_ratio
from fusedrec_torchrec.bench.suite import DEDUP_PER_TABLE
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["Fusion", "Messages"]

SMALL = 64 << 10


@dataclass(frozen=True)
class Messages:
    """What a system sends in a step.

    Attributes:
        rounds: collectives of a rank.
        sizes: bytes of a message from one rank to another, of every collective and rank.
        bandwidth: bytes a second that a rank sends while nothing but its messages is under way.
    """

    rounds: int
    sizes: list[float]
    bandwidth: float

    @property
    def small(self) -> float:
        """Share of messages under 64 KiB."""
        return sum(size < SMALL for size in self.sizes) / max(len(self.sizes), 1)


class Fusion:
    """Compares rows in one exchange with rows in an exchange for each table.

    Attributes:
        apart: messages of dedup by table.
        fused: those of ``fused_row_wise``, which sends the same rows.
        bandwidth: that of the fused messages in units of that of dedup by table.
        speed_up: time of a step of dedup by table / of a fused step.
        no_dedup: time of the best stock step / of a fused step; None if no stock system was run.
    """

    def __init__(self, w: WorkloadFigures) -> None:
        assert self.measured(w)
        self.apart, self.fused = (_messages(w, name) for name in (DEDUP_PER_TABLE, FUSED))
        seconds, sent = w.measured["replay_seconds"], w.measured["replay_bytes"]
        slower = paired_ratio(seconds[DEDUP_PER_TABLE], seconds[FUSED])
        more = sent[FUSED] / sent[DEDUP_PER_TABLE]
        self.bandwidth = Ratio(
            *(more * value for value in (slower.median, slower.low, slower.high))
        )
        steps = w.measured["seconds"]
        self.speed_up = paired_ratio(steps[DEDUP_PER_TABLE], steps[FUSED])
        self.no_dedup = w.speed_up

    @staticmethod
    def measured(w: WorkloadFigures) -> bool:
        """Returns whether a workload has both systems, and their ranks send anything."""
        sent = w.measured.get("replay_bytes", {})
        return all(sent.get(name) for name in (DEDUP_PER_TABLE, FUSED))


def _messages(w: WorkloadFigures, system: str) -> Messages:
    wire = w.measured["wire"][system]
    peers = w.config.ranks - 1
    seconds, sent = w.measured["replay_seconds"][system], w.measured["replay_bytes"][system]
    return Messages(
        rounds=max(len(rank) for rank in wire),
        sizes=[c["bytes_sent"] / max(peers, 1) for rank in wire for c in rank],
        bandwidth=sent / w.config.ranks / median(seconds),
    )
