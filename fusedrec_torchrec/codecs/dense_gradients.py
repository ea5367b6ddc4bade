"""DCT for data-parallel gradients: only entries that reach a threshold travel, none is lost.

This is dynamic communication thresholding (DCT, KDD 2021) with error feedback.  The residual of
earlier steps is added to a gradient.  Entries that reach the parameter's threshold travel; the
others, and what rounding takes from those that do, are the residual for the next step, so that
nothing is lost.  Small parameters travel whole.

A bucket of DistributedDataParallel is one all-gather.  Every message has room for the same number
of entries, so all ranks know its size; entries that have no room are in the residual, too.
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
from fusedrec_torchrec.codecs.dct import DctCodec
from fusedrec_torchrec.codecs.numbers import NumberCodec
from fusedrec_torchrec.codecs.threshold import Threshold
from fusedrec_torchrec.codecs.threshold_options import ThresholdOptions
from fusedrec_torchrec.codecs.traffic import Traffic
from fusedrec_torchrec.compat.communication_hooks import hook_states
from fusedrec_torchrec.compat.model_parallel import wrapped_module
from fusedrec_torchrec.core.fingerprint import check_same_on_all_ranks, facts_of

__all__ = ["GradientThresholds", "ThresholdedDataParallel", "thresholds_of"]

LINE = 1 << 14  # entries whose places are told apart by two bytes
LEAST_USE = 0.1  # share of a message's room; if less is used, thresholds are renewed


class ThresholdedDataParallel(DefaultDataParallelWrapper):
    """Wraps the dense part of a model so that its gradients travel with DCT.

    It is a ``data_parallel_wrapper`` for ``DistributedModelParallel``.

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
        """Wraps the dense part; ranks must have been given the same options."""
        facts = facts_of("options", self._options)
        check_same_on_all_ranks("ThresholdOptions", facts, env.process_group, device)
        was_wrapped = isinstance(wrapped_module(dmp), DistributedDataParallel)
        super().wrap(dmp, env, device)
        ddp = wrapped_module(dmp)
        if isinstance(ddp, DistributedDataParallel) and not was_wrapped:
            thresholds = GradientThresholds(self._options, ddp.module, ddp.process_group)
            thresholds.register(ddp)


def thresholds_of(model: nn.Module) -> "GradientThresholds | None":
    """Returns the thresholds of a model's dense gradients; None if these travel whole."""
    return next(
        (
            state
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
            for state in hook_states(module)
            if isinstance(state, GradientThresholds)
        ),
        None,
    )


@dataclass
class _ParameterState:
    """What is kept of a parameter's gradients from step to step.

    Attributes:
        threshold: that its entries must reach.
        residual: what has not travelled yet; None if nothing.
    """

    threshold: Threshold
    residual: torch.Tensor | None = None


@dataclass
class _Layout:
    """How the parameters of a bucket make up a message.

    Attributes:
        large: indices of the parameters of which entries travel.
        small: indices of those that travel whole.
        starts: where each large one begins in the flat entries, and their end.
        codec: the codec of the entries.
    """

    large: list[int]
    small: list[int]
    starts: list[int]
    codec: DctCodec = field(repr=False)

    @property
    def lines(self) -> int:
        return -(-self.starts[-1] // LINE)


class GradientThresholds:
    """The communication hook that applies DCT to the gradients of DistributedDataParallel.

    It also holds what this rank keeps from step to step: thresholds and residuals.

    Args:
        options: the user's settings.
        module: whose parameters have the gradients.
        pg: ranks over which gradients are averaged.
    """

    def __init__(self, options: ThresholdOptions, module: nn.Module, pg: dist.ProcessGroup) -> None:
        self._options = options
        self._states: dict[str, _ParameterState] = {}
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._previous: dict[str, tuple[torch.Tensor | None, Any]] = {}
        self._pg = pg
        self.traffic = Traffic()
        """Bytes of an all-reduce, and of our messages, for parameters that do not travel whole."""

    def register(self, ddp: DistributedDataParallel) -> None:
        """Becomes the communication hook of what wraps the module."""
        ddp.register_comm_hook(self, GradientThresholds._hook)

    # ------------------------------------------------------------ a bucket of DDP

    @staticmethod
    def _hook(
        thresholds: "GradientThresholds",
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks at it
    ) -> torch.futures.Future[torch.Tensor]:
        return thresholds.reduce(bucket)

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Starts to average a bucket of gradients over the ranks, as DDP asks its hook to."""
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
            self._average(gathered.view(ranks, -1), gradients, layout)
            return buffer

        return work.get_future().then(arrived)

    def _all_reduce(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket as DDP does without a hook."""
        buffer.div_(self._pg.size())
        work = dist.all_reduce(buffer, group=self._pg, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _layout(self, names: tuple[str, ...], gradients: Sequence[torch.Tensor]) -> _Layout:
        """Returns the layout of a bucket; DDP forms buckets anew after the first step."""
        if names not in self._layouts:
            sizes = [gradient.numel() for gradient in gradients]
            large = [i for i, size in enumerate(sizes) if size >= self._options.min_elements]
            options = self._options
            for i in large:
                self._states.setdefault(
                    names[i], _ParameterState(Threshold(options.density, options.every))
                )
            starts = [*accumulate((sizes[i] for i in large), initial=0)]
            # The last line is not full: room is a share of what there is.
            share = options.density * starts[-1] / max(-(-starts[-1] // LINE) * LINE, 1)
            self._layouts[names] = _Layout(
                large,
                [i for i in range(len(sizes)) if i not in set(large)],
                starts,
                DctCodec(LINE, share, options.every, NumberCodec.of(options.values, 1)),
            )
        return self._layouts[names]

    def _message(
        self, names: tuple[str, ...], gradients: Sequence[torch.Tensor], layout: _Layout
    ) -> torch.Tensor:
        """Returns the bytes of this rank's message, and keeps what does not travel."""
        size, device = layout.starts[-1], gradients[0].device
        flat = torch.zeros(layout.lines * LINE, device=device)
        slices = flat[:size].split([gradients[i].numel() for i in layout.large])
        states = [self._states[names[i]] for i in layout.large]
        for entries, i, state in zip(slices, layout.large, states, strict=True):
            self._previous[names[i]] = state.residual, state.threshold.snapshot()
            entries.copy_(gradients[i].reshape(-1))
            if state.residual is not None:
                entries.add_(state.residual.reshape(-1))
        # In units of a parameter's threshold; if that is zero, an entry of zero reaches it.
        scores = torch.zeros_like(flat)
        for entries, out, state in zip(
            slices, scores[:size].split([s.numel() for s in slices]), states, strict=True
        ):
            tau = state.threshold(entries).clamp(min=torch.finfo(torch.float32).tiny)
            torch.div(entries.abs(), tau, out=out)
        codec, lines = layout.codec, layout.lines
        streams, _, used = codec.encode_entries(
            flat.view(lines, LINE), scores.view(lines, LINE), flat.new_ones(()), [lines]
        )
        coded = sum(stream.nbytes for stream in streams) * self._pg.size()
        self.traffic.add(2 * 4 * size, coded)
        if not LEAST_USE <= used <= 1:
            for state in states:
                state.threshold.expire()
        if self._options.error_feedback:
            self._keep_residuals(flat, streams, layout, states)
        whole = [as_bytes(gradients[i].float()) for i in layout.small]
        return torch.cat([*streams, *whole])

    def _keep_residuals(
        self,
        flat: torch.Tensor,
        streams: Sequence[torch.Tensor],
        layout: _Layout,
        states: Sequence[_ParameterState],
    ) -> None:
        """Keeps what has not travelled; of NaN and infinity, nothing."""
        entries, values_E = layout.codec.decode_entries(streams, [layout.lines])
        entries.add(-values_E, flat)
        flat.nan_to_num_(0.0, 0.0, 0.0)
        sizes = [end - start for start, end in zip(layout.starts, layout.starts[1:], strict=False)]
        residuals = flat[: layout.starts[-1]].split(sizes)
        for residual, state in zip(residuals, states, strict=True):
            state.residual = residual

    def _average(
        self, gathered: torch.Tensor, gradients: Sequence[torch.Tensor], layout: _Layout
    ) -> None:
        """Writes the mean of all ranks' messages into the gradients."""
        ranks, codec, lines = len(gathered), layout.codec, layout.lines
        flat = torch.zeros(lines * LINE, device=gathered.device)
        entry_bytes = sum(map(sum, codec.sizes([lines])))
        sizes = [sum(stream) for stream in codec.sizes([lines])]
        for message in gathered:  # one after another: the same sums on all ranks
            entries, values_E = codec.decode_entries(message[:entry_bytes].split(sizes), [lines])
            entries.add(values_E / ranks, flat)
        for i, start, end in zip(layout.large, layout.starts, layout.starts[1:], strict=False):
            gradients[i].copy_(flat[start:end].view_as(gradients[i]))
        if layout.small:
            whole = as_numbers(gathered[:, entry_bytes:].contiguous().view(-1), torch.float32)
            means = (whole.view(ranks, -1) / ranks).sum(0)
            by_parameter = means.split([gradients[i].numel() for i in layout.small])
            for i, mean in zip(layout.small, by_parameter, strict=True):
                gradients[i].copy_(mean.view_as(gradients[i]))

    # ------------------------------------------------------------ state

    def undo(self) -> None:
        """Forgets the last step, whose gradients are not used."""
        for name, (residual, threshold) in self._previous.items():
            self._states[name].residual = residual
            self._states[name].threshold.restore(threshold)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the thresholds and residuals of this rank, by the names that checkpoints have."""
        tensors = {}
        for name, state in self._states.items():
            tensors[f"{name}.threshold"] = state.threshold.state()
            if state.residual is not None:
                tensors[f"{name}.left"] = state.residual
        return tensors

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Takes over what ``state`` returned, on this rank or on all ranks of another training.

        Args:
            states: none, to begin anew; that of one rank, to go on as that rank; or those of all
                ranks of a training with another number of them, to share their residuals.  Since
                gradients are averaged over ranks, each rank then has the mean of the residuals.
        """
        names = {
            name.removesuffix(".threshold")
            for state in states
            for name in state
            if name.endswith(".threshold")
        }
        self._states.clear()
        self._layouts.clear()
        for name in sorted(names):
            threshold = Threshold(self._options.density, self._options.every)
            threshold.load([state[f"{name}.threshold"] for state in states])
            residuals = [state[f"{name}.left"] for state in states if f"{name}.left" in state]
            device = next(iter(self._names)).device
            mean = torch.stack(residuals).mean(0).to(device) if residuals else None
            self._states[name] = _ParameterState(threshold, mean)
        self._previous.clear()
