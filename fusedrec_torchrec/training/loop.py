"""Trains on one rank, from the first step to the last evaluation."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from tqdm import tqdm

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.checkpoint.save import SaveError
from fusedrec_torchrec.codecs.dense_gradients import thresholds_of
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.core.all_ranks import on_first_rank
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.core.config import to_mapping, to_yaml
from fusedrec_torchrec.core.lost_rank import explained, waiting
from fusedrec_torchrec.exchange.early_dist import EarlyCount
from fusedrec_torchrec.grid.model_parallel import GridModelParallel
from fusedrec_torchrec.hot.rows import hot_rows_of, reconcile
from fusedrec_torchrec.sharding.modules.fused_tables import fused_tables_of
from fusedrec_torchrec.sharding.plan_file import write_plan
from fusedrec_torchrec.sharding.train_pipeline import FusedTrainPipeline
from fusedrec_torchrec.training.agreement import check_same_configuration
from fusedrec_torchrec.training.bad_batches import BadBatches, GuardedOptimizer
from fusedrec_torchrec.training.checkpoint import Checkpointer, load_state
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loaders import eval_loader, first_rates, train_loader
from fusedrec_torchrec.training.logs import RunLog, Value, read_log
from fusedrec_torchrec.training.metrics import ClickMetrics, ClickSums
from fusedrec_torchrec.training.model import build_model, shard_model
from fusedrec_torchrec.training.observed_step import ObservedStep, observing, of_all_ranks
from fusedrec_torchrec.training.optimizers import build_optimizer, learning_rates, schedule_position
from fusedrec_torchrec.training.run_state import RunState, read_run_state

__all__ = ["Training"]

DDP_STEPS = 3
COUNT_APART = 5


@dataclass
class _Window:
    """Holds time and traffic since the last record, and what one step of them was like."""

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    traffic: dict[str, float] = field(default_factory=dict)
    observed: ObservedStep | None = None


class Training:
    """Is the training of one run, on one rank.

    Args:
        config: of the run.
        source: the data.
        device: of this rank.
        resume: checkpoint to go on from, if any.
        quiet: shows no progress and tells nothing about single steps.
    """

    def __init__(
        self,
        config: TrainConfig,
        source: Source,
        device: torch.device,
        resume: Path | None,
        quiet: bool = False,
    ) -> None:
        check_same_configuration(config, source)
        self._config = config
        self._source = source
        self._device = device
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._is_first = rank == 0
        self._shows_progress = self._is_first and not quiet
        self._rates = first_rates(config)
        torch.manual_seed(config.seed)
        unsharded = build_model(config.model, source, device)
        self.model, planned = shard_model(unsharded, config, source, device)
        self._lookups = lookups_of(self.model)
        # Only fused tables hash: ids of others are rows, whatever the exchange's settings are.
        hashed = {
            name for _, fused in fused_tables_of(self.model) for name in fused.hashed_tables()
        }
        self._train_data = train_loader(config, source, rank, world_size, self._rates, hashed)
        self._eval_data = eval_loader(config, source, rank, world_size, hashed)
        self.steps = config.steps or config.epochs * self._train_data.batches
        self.optimizer = build_optimizer(self.model, config.optimizer, self.steps)
        timeout = timedelta(seconds=config.launch.timeout_seconds)
        self._bad_batches = BadBatches(config.bad_batches, timeout, quiet)
        if config.bad_batches.gradients:
            self._bad_batches.guard(unsharded.model.sparse_arch)
        guarded = GuardedOptimizer(self.optimizer, self._bad_batches, thresholds_of(self.model))
        self._pipeline: TrainPipelineSparseDist[Any, Any]
        if config.sharding.early_rows:
            self._pipeline = FusedTrainPipeline(self.model, guarded, device)
        else:
            self._pipeline = TrainPipelineSparseDist(self.model, guarded, device)
        self._sums = ClickSums(device)
        self.step = 0
        if resume is not None:
            with waiting(None, "dense part"):
                self._resume(resume)

        folder = config.logging.directory
        self._checkpointer = Checkpointer(
            folder / "checkpoints",
            config.checkpoint.keep,
            config.checkpoint.asynchronous,
            config.checkpoint.on_error == "stop",
            planned,
        )
        self._log = None
        if self._is_first:
            self._log = RunLog(folder, self.step, config.logging.tensorboard)
            (folder / "config.yaml").write_text(to_yaml(config))
            write_plan(folder / "plan.yaml", *planned)

    def _resume(self, path: Path) -> None:
        state = read_run_state(path)
        # DistributedDataParallel puts gradients into other buckets in its first steps than later,
        # and sums in another order differ in the last bit: so these steps are run, and undone by
        # loading.
        warm_up = min(state.step, DDP_STEPS)
        batches = self._bad_batches.watch(self._train_data.read(0, warm_up), 0, warm_up)
        self.model.train()
        for _ in range(warm_up):
            self._pipeline.progress(batches)
        schedule = schedule_position(self._config.optimizer.schedule, self.steps, state.step)
        report = load_state(path, self.model, self.optimizer, schedule)
        if report.converted and self._is_first:
            print(
                f"{path}: {len(report.converted)} optimizer states of another sharding converted: "
                f"{report.converted[0]}" + ("; ..." if len(report.converted) > 1 else ""),
                file=sys.stderr,
            )
        self._sums.load(state.sums)
        self._bad_batches.go_on(state.skipped)
        if state.rates is not None and self._config.data.hot_batches.adaptive:
            self._rates.load(state.rates)
        self.step = state.step

    def run(self) -> dict[str, float]:
        """Trains to the last step; returns the last evaluation, and throughput over the run."""
        try:
            return self._run()
        except ValueError:  # bad data, on all ranks: what was saved before it is good
            self._checkpointer.let_finish()
            raise
        except SaveError:
            raise
        except RuntimeError as error:
            raise explained(error, stage="dense part") from error

    def _run(self) -> dict[str, float]:
        config = self._config
        stream = self._train_data.read(self.step, self.steps) if self.step < self.steps else None
        self._window = _Window()
        self._next_count = self._next_observation = 0
        self._started, self._trained, self._train_seconds = False, 0, 0.0
        with tqdm(
            total=self.steps,
            initial=self.step,
            unit="step",
            disable=not self._shows_progress,
            dynamic_ncols=True,
        ) as bar:
            logged = self._logged_evaluation()
            if logged is None and self._evaluation_due():
                logged = self._evaluate(bar)  # stopped between a checkpoint and its evaluation
            self._adapt(logged)
            result: dict[str, float] = dict(logged or {})
            while self.step < self.steps:
                stop = self.steps
                if config.eval_every:
                    stop = min(stop, (self.step // config.eval_every + 1) * config.eval_every)
                assert stream is not None
                self._train_until(stop, stream, bar)
                result = self._evaluate(bar)
                self._adapt(result)
        self._checkpointer.wait()
        if self._log is not None:
            self._log.close()
        if self._train_seconds:
            samples = self._trained * config.data.batch_size
            result["samples_per_second"] = samples / self._train_seconds
        return result

    def _adapt(self, evaluation: dict[str, float] | None) -> None:
        """Lets an evaluation decide how hot and cold batches alternate from here on."""
        if evaluation:
            self._rates.evaluated(self.step, evaluation["log_loss"])

    def _evaluation_due(self) -> bool:
        every = self._config.eval_every
        return self.step == self.steps or bool(every and self.step and self.step % every == 0)

    def _logged_evaluation(self) -> dict[str, float] | None:
        """Returns this step's evaluation on all ranks, if an earlier attempt has logged it."""

        def logged() -> dict[str, float] | None:
            records = read_log(self._config.logging.directory)
            last = [r for r in records if r["kind"] == "eval" and r["step"] == self.step]
            return {k: v for k, v in last[-1].items() if isinstance(v, float)} if last else None

        return on_first_rank(logged)

    def _train_until(self, stop: int, stream: Iterator[Batch], bar: Any) -> None:
        config = self._config
        start = self.step
        segment = self._bad_batches.watch(stream, start, stop)
        self.model.train()
        while self.step < stop:
            # The pipeline starts two exchanges in a segment's first step and none in its last.
            typical = start < self.step < stop - 1
            count = typical and not self._window.traffic and self._is_due(self._next_count)
            observe = (
                not count
                and typical
                and self._window.observed is None
                and self._is_due(self._next_observation)
            )
            if count:
                self._next_count = self.step + COUNT_APART
            elif observe:
                self._next_observation = self.step + COUNT_APART
            self._step(segment, count, observe)
            self.step += 1
            logs = self.step % config.logging.log_every == 0 or self.step == self.steps
            bar.update()
            self._checkpointer.poll()
            if logs:
                self._record(bar)
            every = config.checkpoint.every
            if every and (self.step % every == 0 or self.step == self.steps):
                self._save()

    def _is_due(self, step: int) -> bool:
        """Returns whether a step may be looked at, which not every one may be.

        A counted step tells nothing about speed.
        """
        return self._config.logging.log_every >= COUNT_APART or self.step >= step

    def _step(self, segment: Iterator[Batch], count: bool, observe: bool) -> None:
        """Does one step; a counted one sees every operator, so it is left out of the throughput."""
        begun, waited = time.perf_counter(), self._train_data.waited
        skipped = self._bad_batches.skipped_steps
        if count:
            with CollectiveCounter() as counter:
                _, logits, labels = self._pipeline.progress(segment)
            self._window.traffic = _traffic(counter)
        elif observe:
            with observing(self._lookups, self._device) as observed:
                _, logits, labels = self._pipeline.progress(segment)
            observed.waited_for_data(self._train_data.waited - waited)
            self._window.observed = observed
        else:
            _, logits, labels = self._pipeline.progress(segment)
        if self._bad_batches.skipped_steps == skipped:
            self._sums.update(logits, labels)
        seconds = time.perf_counter() - begun
        if not count and self._started:
            self._trained += 1
            self._train_seconds += seconds
            self._window.steps += 1
            self._window.seconds += seconds
            self._window.waited += self._train_data.waited - waited
        self._started = True  # the first step also starts readers and the pipeline

    def _record(self, bar: Any) -> None:
        window = self._window
        quality, of_ranks = of_all_ranks(self._sums, window.observed, window.traffic)
        self._sums.reset()
        if not quality:  # all steps were skipped
            quality = {"log_loss": float("nan")}
        elif not quality["log_loss"] < float("inf"):  # also when it is NaN
            raise ValueError(
                f"the training loss is {quality['log_loss']} at step {self.step}: lower the "
                "learning rates (optimizer.embedding.learning_rate, "
                "optimizer.dense.learning_rate) or look for bad values in the dense features"
            )
        values: dict[str, Value] = {**quality}
        if window.seconds:
            values["samples_per_second"] = (
                window.steps * self._config.data.batch_size / window.seconds
            )
            values["waiting_for_data"] = window.waited / window.seconds
        values |= window.traffic
        values |= of_ranks
        used = [hot.used for hot in hot_rows_of(self.model)]
        if any(use.rows for use in used):
            values["hot_share_of_rows"] = sum(u.hot for u in used) / sum(u.rows for u in used)
            for use in used:
                use.reset()
        if isinstance(self._pipeline, FusedTrainPipeline):
            values |= _early_share(self._pipeline.early_rows)
        values |= _fewer_bytes(self.model)
        if self._bad_batches.skipped:
            values["skipped_steps"] = self._bad_batches.skipped
        if self._checkpointer.failed:
            values["failed_saves"] = self._checkpointer.failed
        for name, rate in learning_rates(self.optimizer).items():
            values[f"learning_rate_{name}"] = rate
        self._window = _Window()
        if self._log is not None:
            self._log.write(self.step, "train", values)
        bar.set_postfix(loss=f"{quality['log_loss']:.4f}", refresh=False)

    def _reconcile(self) -> None:
        """Makes groups and ranks equal that have learned alone for some steps."""
        reconcile(self.model)
        if isinstance(self.model, GridModelParallel):
            self.model.sync_now()

    def _save(self) -> None:
        state = RunState(
            step=self.step,
            sums=self._sums.state(),
            config=to_mapping(self._config),
            data=self._source.identity,
            world_size=dist.get_world_size(),
            skipped=self._bad_batches.skipped,
            rates=self._rates.state(),
        )
        self._reconcile()
        self._checkpointer.save(self.model, self.optimizer, state)

    @torch.no_grad()
    def _evaluate(self, bar: Any) -> dict[str, float]:
        """Evaluates the model on held-out data; all ranks take part."""
        count = self._eval_data.batches
        if self._config.eval_batches is not None:
            count = min(count, self._config.eval_batches)
        if count == 0:
            return {}
        self._reconcile()  # all ranks evaluate the same model, the one that would be saved
        self.model.eval()
        metrics = ClickMetrics(self._device)
        good: deque[bool] = deque()
        batches = self._bad_batches.held_out(self._eval_data.read(0, count), count, good)
        for _ in range(count):
            _, logits, labels = self._pipeline.progress(batches)
            if good.popleft():
                metrics.update(logits, labels)
        values = metrics.compute()
        if not values:
            if self._is_first:
                print("no held-out batch could be evaluated", file=sys.stderr, flush=True)
            return {}
        if self._log is not None:
            self._log.write(self.step, "eval", values)
        bar.set_description(f"AUC {values['auc']:.4f}", refresh=False)
        return values


def _fewer_bytes(model: torch.nn.Module) -> dict[str, float]:
    """Returns how many times fewer bytes codecs have sent since the last record."""
    wires = [fused.wires for _, fused in fused_tables_of(model) if fused.wires is not None]
    dense = thresholds_of(model)
    values = {}
    for name, traffics in {
        "rows": [forward.traffic for forward, _ in wires],
        "gradients": [backward.traffic for _, backward in wires],
        "dense_gradients": [] if dense is None else [dense.traffic],
    }.items():
        coded = sum(traffic.coded for traffic in traffics)
        if coded:
            values[f"{name}_fewer_bytes"] = sum(traffic.plain for traffic in traffics) / coded
        for traffic in traffics:
            traffic.reset()
    return values


def _early_share(counts: Sequence[EarlyCount]) -> dict[str, float]:
    """Returns the share of rows of other ranks that came early since the last record."""
    rows, early = sum(count.rows for count in counts), sum(count.early for count in counts)
    for count in counts:
        count.reset()
    return {"early_share_of_rows": early / rows} if rows else {}


def _traffic(counter: CollectiveCounter) -> dict[str, float]:
    values: dict[str, float] = {
        "collectives_per_step": len(counter.collectives),
        "bytes_sent_per_step": counter.bytes_sent(),
    }
    for name in sorted({collective.name for collective in counter.collectives}):
        values[f"{name}_per_step"] = sum(c.name == name for c in counter.collectives)
        values[f"{name}_bytes_per_step"] = counter.bytes_sent(name)
    return values
