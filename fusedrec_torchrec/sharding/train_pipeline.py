"""TorchRec's training pipeline, in which rows arrive early that are final already."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

from fusedrec_torchrec.exchange.early_dist import EarlyCount, EarlyDist
from fusedrec_torchrec.exchange.late_gradients import LateGradients
from fusedrec_torchrec.exchange.outgoing_batch import ReceivedOnce
from fusedrec_torchrec.sharding.modules.fused_tables import FusedTables, fused_tables_of

__all__ = ["FusedTrainPipeline"]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class FusedPipelineContext(TrainPipelineContext):
    """What the pipeline knows of a batch.

    Attributes:
        received: by the name of a module with fused tables what its owners are asked for, once all
            headers have been read.
        late_gradients: of the batch's rows, for after backward.
    """

    received: dict[str, ReceivedOnce] = field(default_factory=dict)
    late_gradients: LateGradients = field(default_factory=LateGradients)


class FusedTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """TorchRec's ``TrainPipelineSparseDist``, with rows of fused tables that arrive early.

    The ids of the next batch arrive while the current one is computed.  Rows that the current batch
    does not touch, on any rank, have the value already that the next one will see: they are sent
    before the current one's backward and travel during it.  The rest follows after the update, with
    the next batch.  No row travels twice; there are two more collectives in a step for each module:
    a bit for each row that is asked for, and the early rows.  Gradients of rows are awaited when
    backward of the dense part is over.  Outputs, weights and optimizer state are those of
    ``TrainPipelineSparseDist`` and of a plain loop, to the last bit.

    Rows stay valid over evaluations, checkpoints and changes of the learning rate.  If a state is
    loaded, or other batches are trained while the pipeline is detached, they are thrown away and
    sent again; all ranks must do so alike, between the same two steps.  Nobody notices weights that
    are written by hand: do that before the first step, or load them as a state dict.

    A bag that its owner pools (``fused_table_wise``, ``fused_column_wise``) is early if none of its
    rows is touched.  Rows with a codec that encodes several of them together (fp16 without
    ``loss_scale``, int8) or keeps a state (dct), and with a registry's own, all travel after the
    update.  Stock tables are as in TorchRec.

    Args:
        model: the sharded model.
        optimizer: that of all parameters.
        device: where batches are computed; must be the CPU.
        **kwargs: those of ``TrainPipelineSparseDist``.

    Raises:
        ValueError: the tables are on CUDA, have weight decay, or groups of ranks are replicas of
            each other.

    Example::

        pipeline = fr.FusedTrainPipeline(model, optimizer, torch.device("cpu"))
        loss, output = pipeline.progress(batches)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        self._early_dists: dict[FusedTables, EarlyDist | None] = {
            fused: fused.create_early_dist() for _, fused in fused_tables_of(model)
        }
        self._fused: dict[str, FusedTables] = {}
        super().__init__(model, optimizer, device, context_type=FusedPipelineContext, **kwargs)

    @property
    def early_rows(self) -> list[EarlyCount]:
        """How many rows came early so far, of each module that has such."""
        return [dist.count for dist in self._early_dists.values() if dist is not None]

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        super()._pipeline_model(*args, **kwargs)
        modules: Any = self._pipelined_modules
        self._fused = {
            module.forward.name: fused for module in modules for _, fused in fused_tables_of(module)
        }
        for fused in self._fused.values():
            if fused not in self._early_dists:  # of another model, that was attached
                self._early_dists[fused] = fused.create_early_dist()

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        super().wait_sparse_data_dist(context)
        assert isinstance(context, FusedPipelineContext)
        context.received = {
            name: self._fused[name].received_of(request)
            for name, request in context.input_dist_tensors_requests.items()
            if name in self._fused
        }
        for received in context.received.values():
            received.context.late_gradients = context.late_gradients

    def _backward(self, losses: torch.Tensor) -> None:
        current, *coming = list(self.contexts)[:2]
        for context in coming:
            self._send_early(current, context)
        super()._backward(losses)
        current.late_gradients.apply()

    @torch.no_grad()
    def _send_early(self, current: FusedPipelineContext, coming: FusedPipelineContext) -> None:
        """Sends rows of the next batch that the current one leaves as they are."""
        promises = []
        for name, fused in self._fused.items():
            dist = self._early_dists[fused]
            if dist is None or name not in current.received or name not in coming.received:
                continue
            rows_now, rows_next = current.received[name].wait(), coming.received[name].wait()
            promise = dist.promise(rows_now, rows_next)
            if promise is not None:
                promises.append((dist, promise))
        for dist, promise in promises:
            dist.send(promise)
