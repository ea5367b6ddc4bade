"""Which lookups come after the end of a rank's data: by counting alone."""

import gc
from collections.abc import Sequence

import pytest
from torchrec.distributed.types import Awaitable, NoWait

from fusedrec_torchrec.sharding.modules.batches_ahead import BatchesAhead
from fusedrec_torchrec.sharding.modules.module_set import ModuleSet


class Module:
    """Writes down what is sent for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log


class Ends(Awaitable[None]):
    """Messages that some modules have no more batches."""

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__()
        self._modules = modules
        for module in modules:
            module.log.append(f"end {module.name}")

    def _wait_impl(self) -> None:
        for module in self._modules:
            module.log.append(f"heard {module.name}")


def pipeline(ahead: BatchesAhead[Module], modules: list[Module], batches: int) -> None:
    """As TorchRec's: the ids of the next batch are sent before a batch is looked up."""
    for batch in range(batches):
        for number in (0, 1) if batch == 0 else (batch + 1,):
            if number < batches:
                for module in modules:
                    ahead.sent(module)
        look_up(ahead, modules)


def plain(ahead: BatchesAhead[Module], modules: list[Module], batches: int) -> None:
    for _ in range(batches):
        for module in modules:
            call(ahead, module)


def call(ahead: BatchesAhead[Module], module: Module) -> None:
    """As a plain loop calls a module."""
    ahead.sent(module)
    ahead.watch_request(module, NoWait(None)).wait()
    look_up(ahead, [module])


def look_up(ahead: BatchesAhead[Module], modules: list[Module]) -> None:
    for module in modules:
        ahead.used(module)
        ahead.watch_output(NoWait(None)).wait()


def test_all_modules_say_it_once_in_the_order_of_their_batches() -> None:
    log: list[str] = []
    modules = [Module("a", log), Module("b", log)]
    pipeline(BatchesAhead(Ends), modules, 4)
    assert log == ["end a", "end b", "heard a", "heard b"]


def test_every_epoch_ends() -> None:
    log: list[str] = []
    ahead, modules = BatchesAhead(Ends), [Module("a", log)]
    for _ in range(3):
        pipeline(ahead, modules, 2)
    assert log == ["end a", "heard a"] * 3


def test_plain_loops_say_nothing() -> None:
    log: list[str] = []
    ahead, modules = BatchesAhead(Ends), [Module("a", log), Module("b", log)]
    for _ in range(3):
        plain(ahead, modules, 3)
    assert log == []


def test_a_single_batch_of_a_pipeline_is_its_end() -> None:
    log: list[str] = []
    ahead, modules = BatchesAhead(Ends), [Module("a", log)]
    plain(ahead, modules, 2)
    pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"]
    pipeline(ahead, modules, 3)
    pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"] * 3


def test_pipelines_that_never_have_a_batch_ahead_say_it_once() -> None:
    """Every batch of theirs looks like an epoch of one batch."""
    log: list[str] = []
    ahead, modules = BatchesAhead(Ends), [Module("a", log)]
    for _ in range(5):
        pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"]


def test_a_module_that_is_called_in_a_plain_way_is_waited_for() -> None:
    """Other ranks wait for its ids, so this rank must not raise before it has sent them."""
    log: list[str] = []
    ahead, first, second = BatchesAhead(Ends), Module("a", log), Module("b", log)
    for batch in range(3):
        for number in (0, 1) if batch == 0 else (batch + 1,):
            if number < 3:
                ahead.sent(first)
        look_up(ahead, [first])
        log.append("b sends")
        call(ahead, second)
    assert log == ["b sends", "b sends", "end a", "b sends", "heard a"]


def test_a_model_that_is_sharded_later_is_counted_by_itself() -> None:
    modules, log = ModuleSet(), list[str]()
    first = modules.add(["a"])
    assert modules.add(["b"]) is first  # another module of the model
    first.sent(Module("a", log))  # type: ignore[arg-type]
    assert modules.add(["c"]) is not first


def test_what_was_not_heard_is_heard_before_the_next_batch() -> None:
    """The second module was not called in the last step."""
    log: list[str] = []
    ahead, modules = BatchesAhead(Ends), [Module("a", log), Module("b", log)]
    for module in [*modules, *modules]:
        ahead.sent(module)
    look_up(ahead, modules)
    look_up(ahead, modules[:1])
    assert log == ["end a", "end b"]
    ahead.sent(modules[0])
    assert log == ["end a", "end b", "heard a", "heard b"]


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize("batches", [2, 3])
def test_garbage_of_an_earlier_model_makes_no_difference(collected: bool, batches: int) -> None:
    """Ranks collect it at different times, and must still say the same."""
    log: list[str] = []
    ahead, earlier = BatchesAhead(Ends), [Module("old", [])]
    pipeline(ahead, earlier, 3)
    if collected:
        earlier.clear()
        gc.collect()
    pipeline(ahead, [Module("a", log)], batches)
    assert log == ["end a", "heard a"]
