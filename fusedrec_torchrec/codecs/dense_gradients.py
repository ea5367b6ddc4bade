"""Only the largest entries of data-parallel gradients travel (DCT, KDD 2021).

To a gradient what is left of earlier ones is added.  Entries that reach the parameter's threshold
travel; the others, and what rounding takes from those that do, are left for the next step, so that
nothing is lost.  Small parameters travel whole.

A bucket of DistributedDataParallel is one all-gather.  Every message has room for the same number
of entries, so all ranks know its size; entries that have no room are left for the next step, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardingEnv

from fusedrec_torchrec.codecs.codec import as_bytes, as_numbers
from fusedrec_torchrec.codecs.largest import LargestEntries
from fusedrec_torchrec.codecs.numbers import Numbers
from fusedrec_torchrec.codecs.threshold import Threshold
from fusedrec_torchrec.codecs.threshold_options import ThresholdOptions
from fusedrec_torchrec.codecs.traffic import Traffic
from fusedrec_torchrec.core.fingerprint import check_same_on_all_ranks, facts_of

__all__ = ["GradientThresholds", "ThresholdedDataParallel", "thresholds_of"]

LINE = 1 << 14  # entries whose places are told apart by two bytes
USED_AT_LEAST = 0.1  # share of a message's room; of less, thresholds are renewed


class ThresholdedDataParallel(DefaultDataParallelWrapper):
    """A ``data_parallel_wrapper`` for ``DistributedModelParallel``.

    Args:
        options: the user's settings.
        **kwargs: those of ``DefaultDataParallelWrapper``.

    Example::

        DistributedModelParallel(
            model,
            sharders=fr.fused_sharders(),
            data_parallel_wrapper=fr.ThresholdedDataParallel(fr.ThresholdOptions(density=0.005)),
        )
    """

    def __init__(self, options: ThresholdOptions | None = None, **kwargs: Any) -> None:
        if kwargs.get("allreduce_comm_precision") is not None:
            raise ValueError(
                f"allreduce_comm_precision is {kwargs['allreduce_comm_precision']!r}, must be left "
                "out: values of ThresholdOptions is the format of the entries"
            )
        if kwargs.get("find_unused_parameters"):
            raise ValueError(
                "find_unused_parameters is True, must be False: what is left of the gradients of a "
                "parameter would be lost in steps that do not use it"
            )
        super().__init__(**kwargs)
        self._options = options or ThresholdOptions()

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        facts = facts_of("options", self._options)
        check_same_on_all_ranks("ThresholdOptions", facts, env.process_group, device)
        was_wrapped = isinstance(dmp._dmp_wrapped_module, DistributedDataParallel)
        super().wrap(dmp, env, device)
        ddp: Any = dmp._dmp_wrapped_module
        if isinstance(ddp, DistributedDataParallel) and not was_wrapped:
            GradientThresholds(self._options).register(ddp)


def thresholds_of(model: nn.Module) -> "GradientThresholds | None":
    """Of a model whose dense part has them."""
    found = [getattr(each, "fusedrec_thresholds", None) for each in model.modules()]
    return next((each for each in found if isinstance(each, GradientThresholds)), None)


@dataclass
class _Parameter:
    """What is kept of a parameter's gradients.

    Attributes:
        left: what has not travelled yet; None if nothing.
        threshold: of its entries.
    """

    threshold: Threshold
    left: torch.Tensor | None = None


@dataclass
class _Layout:
    """How the parameters of a bucket make up a message.

    Attributes:
        large: indices of parameters of which entries travel.
        small: of those that travel whole.
        starts: where each large one begins in the flat entries, and their end.
        codec: of the entries.
    """

    large: list[int]
    small: list[int]
    starts: list[int]
    codec: LargestEntries = field(repr=False)

    @property
    def lines(self) -> int:
        return -(-self.starts[-1] // LINE)


class GradientThresholds:
    """A communication hook of DistributedDataParallel, and what it keeps on this rank.

    Args:
        options: the user's settings.
    """

    def __init__(self, options: ThresholdOptions) -> None:
        self._options = options
        self._parameters: dict[str, _Parameter] = {}
        self._names: dict[torch.Tensor, str] = {}
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._before: dict[str, tuple[torch.Tensor | None, Any]] = {}
        self._pg: dist.ProcessGroup | None = None
        self.traffic = Traffic()
        """Of parameters that do not travel whole: an all-reduce's bytes, and those of messages."""

    @property
    def _ranks(self) -> int:
        assert self._pg is not None
        return self._pg.size()

    def register(self, ddp: DistributedDataParallel) -> None:
        self._pg = ddp.process_group
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        ddp.register_comm_hook(self, GradientThresholds._hook)
        ddp.fusedrec_thresholds = self  # type: ignore[assignment]

    # ------------------------------------------------------------ a bucket's way

    @staticmethod
    def _hook(
        thresholds: "GradientThresholds",
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks at it
    ) -> torch.futures.Future[torch.Tensor]:
        return thresholds._reduce(bucket)

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert self._pg is not None
        buffer, ranks = bucket.buffer(), self._pg.size()
        gradients = bucket.gradients()
        if self._options.density == 1:
            return self._all_reduce(buffer)
        names = tuple(self._names[parameter] for parameter in bucket.parameters())
        layout = self._layout(names, gradients)
        if not layout.large:
            return self._all_reduce(buffer)
        message = self._message(names, gradients, layout)
        gathered = message.new_empty(ranks * message.numel())
        work = dist.all_gather_single(gathered, message, group=self._pg, async_op=True)

        def arrived(done: Any) -> torch.Tensor:
            done.value()
            self._sum(gathered.view(ranks, -1), gradients, layout)
            return buffer

        return work.get_future().then(arrived)

    def _all_reduce(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """As without a hook."""
        assert self._pg is not None
        buffer.div_(self._pg.size())
        work = dist.all_reduce(buffer, group=self._pg, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _layout(self, names: tuple[str, ...], gradients: Sequence[torch.Tensor]) -> _Layout:
        """DDP forms buckets anew after the first step."""
        if names not in self._layouts:
            sizes = [gradient.numel() for gradient in gradients]
            large = [i for i, size in enumerate(sizes) if size >= self._options.min_elements]
            options = self._options
            for i in large:
                self._parameters.setdefault(
                    names[i], _Parameter(Threshold(options.density, options.every))
                )
            starts = [*accumulate((sizes[i] for i in large), initial=0)]
            # The last line is not full: room is a share of what there is.
            share = options.density * starts[-1] / max(-(-starts[-1] // LINE) * LINE, 1)
            self._layouts[names] = _Layout(
                large,
                [i for i in range(len(sizes)) if i not in set(large)],
                starts,
                LargestEntries(LINE, share, options.every, Numbers.of(options.values, 1)),
            )
        return self._layouts[names]

    def _message(
        self, names: tuple[str, ...], gradients: Sequence[torch.Tensor], layout: _Layout
    ) -> torch.Tensor:
        size, device = layout.starts[-1], gradients[0].device
        flat = torch.zeros(layout.lines * LINE, device=device)
        parts = flat[:size].split([gradients[i].numel() for i in layout.large])
        kept = [self._parameters[names[i]] for i in layout.large]
        for part, i, each in zip(parts, layout.large, kept, strict=True):
            self._before[names[i]] = each.left, each.threshold.snapshot()
            part.copy_(gradients[i].reshape(-1))
            if each.left is not None:
                part.add_(each.left.reshape(-1))
        # In units of a parameter's threshold; of zero, zero is enough.
        magnitudes = torch.zeros_like(flat)
        for part, out, each in zip(
            parts, magnitudes[:size].split([p.numel() for p in parts]), kept, strict=True
        ):
            tau = each.threshold(part).clamp(min=torch.finfo(torch.float32).tiny)
            torch.div(part.abs(), tau, out=out)
        codec, lines = layout.codec, layout.lines
        streams, _, used = codec.encode_those(
            flat.view(lines, LINE), magnitudes.view(lines, LINE), flat.new_ones(()), [lines]
        )
        self.traffic.plain += 2 * 4 * size
        self.traffic.coded += sum(stream.nbytes for stream in streams) * self._ranks
        if not USED_AT_LEAST <= used <= 1:
            for each in kept:
                each.threshold.expire()
        if self._options.error_feedback:
            self._keep(flat, streams, layout, kept)
        whole = [as_bytes(gradients[i].float()) for i in layout.small]
        return torch.cat([*streams, *whole])

    def _keep(
        self,
        flat: torch.Tensor,
        streams: Sequence[torch.Tensor],
        layout: _Layout,
        kept: Sequence[_Parameter],
    ) -> None:
        """What has not travelled; of numbers that are none, nothing."""
        entries, values_E = layout.codec.decode_those(streams, [layout.lines])
        entries.add(-values_E, flat)
        flat.nan_to_num_(0.0, 0.0, 0.0)
        sizes = [end - start for start, end in zip(layout.starts, layout.starts[1:], strict=False)]
        for part, each in zip(flat[: layout.starts[-1]].split(sizes), kept, strict=True):
            each.left = part

    def _sum(
        self, gathered: torch.Tensor, gradients: Sequence[torch.Tensor], layout: _Layout
    ) -> None:
        """The mean of all ranks' messages, into the gradients."""
        ranks, codec, lines = len(gathered), layout.codec, layout.lines
        flat = torch.zeros(lines * LINE, device=gathered.device)
        of_entries = sum(map(sum, codec.sizes([lines])))
        sizes = [sum(stream) for stream in codec.sizes([lines])]
        for message in gathered:  # one after another: the same sums on all ranks
            entries, values_E = codec.decode_those(message[:of_entries].split(sizes), [lines])
            entries.add(values_E / ranks, flat)
        for i, start, end in zip(layout.large, layout.starts, layout.starts[1:], strict=False):
            gradients[i].copy_(flat[start:end].view_as(gradients[i]))
        if layout.small:
            whole = as_numbers(gathered[:, of_entries:].contiguous().view(-1), torch.float32)
            means = (whole.view(ranks, -1) / ranks).sum(0)
            parts = means.split([gradients[i].numel() for i in layout.small])
            for i, part in zip(layout.small, parts, strict=True):
                gradients[i].copy_(part.view_as(gradients[i]))

    # ------------------------------------------------------------ what is kept

    def undo(self) -> None:
        """Forgets the last step, whose gradients are not used."""
        for name, (left, threshold) in self._before.items():
            self._parameters[name].left = left
            self._parameters[name].threshold.restore(threshold)

    def state(self) -> dict[str, torch.Tensor]:
        """Of this rank, by name."""
        found = {}
        for name, each in self._parameters.items():
            found[f"{name}.threshold"] = each.threshold.state()
            if each.left is not None:
                found[f"{name}.left"] = each.left
        return found

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Goes on where others were.

        Args:
            states: of nobody, to begin anew; of one rank, to be that one; or of all of a training
                with another number of ranks, to share what they had left.  Since gradients are
                averaged over ranks, the mean of what was left is what each rank has left then.
        """
        names = {
            name.removesuffix(".threshold")
            for state in states
            for name in state
            if name.endswith(".threshold")
        }
        self._parameters.clear()
        self._layouts.clear()
        for name in sorted(names):
            threshold = Threshold(self._options.density, self._options.every)
            threshold.load([state[f"{name}.threshold"] for state in states])
            left = [state[f"{name}.left"] for state in states if f"{name}.left" in state]
            device = next(iter(self._names)).device
            mean = torch.stack(left).mean(0).to(device) if left else None
            self._parameters[name] = _Parameter(threshold, mean)
        self._before.clear()
