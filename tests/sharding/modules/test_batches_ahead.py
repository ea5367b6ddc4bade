"""Which lookups come after the end of a rank's data: by counting alone."""

import gc
from collections.abc import Sequence
from typing import cast

import pytest
from torchrec.distributed.types import Awaitable, NoWait

from fusedrec_torchrec.sharding.modules.batches_ahead import BatchesAhead
from fusedrec_torchrec.sharding.modules.end_of_data import PipelinedModule
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


def counting(modules: list[Module]) -> BatchesAhead[Module]:
    ahead = BatchesAhead(Ends)
    for module in modules:
        ahead.register(module)
    return ahead


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
    with ahead.call(module):
        module.log.append(f"{module.name} sends")
        ahead.sent(module)
        ahead.used(module)
        output = ahead.watch_output(NoWait(None))
    output.wait()


def look_up(ahead: BatchesAhead[Module], modules: list[Module]) -> None:
    for module in modules:
        ahead.used(module)
        ahead.watch_output(NoWait(None)).wait()


def test_all_modules_say_it_once_in_the_order_of_their_batches() -> None:
    log: list[str] = []
    modules = [Module("a", log), Module("b", log)]
    pipeline(counting(modules), modules, 4)
    assert log == ["end a", "end b", "heard a", "heard b"]


def test_every_epoch_ends() -> None:
    log: list[str] = []
    modules = [Module("a", log)]
    ahead = counting(modules)
    for _ in range(3):
        pipeline(ahead, modules, 2)
    assert log == ["end a", "heard a"] * 3


def test_plain_loops_say_nothing() -> None:
    log: list[str] = []
    modules = [Module("a", log), Module("b", log)]
    ahead = counting(modules)
    for _ in range(3):
        plain(ahead, modules, 3)
    assert log == ["a sends", "b sends"] * 9


def test_a_single_batch_of_a_pipeline_is_its_end() -> None:
    log: list[str] = []
    modules = [Module("a", log)]
    ahead = counting(modules)
    plain(ahead, modules, 2)
    log.clear()
    pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"]
    pipeline(ahead, modules, 3)
    pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"] * 3


def test_pipelines_that_never_have_a_batch_ahead_say_it_once() -> None:
    """Every batch of theirs looks like an epoch of one batch."""
    log: list[str] = []
    modules = [Module("a", log)]
    ahead = counting(modules)
    for _ in range(5):
        pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"]


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_module_that_is_called_in_a_plain_way_is_waited_for(plain_first: bool) -> None:
    """Other ranks have sent the next batch before it is called, and wait for its ids after that."""
    log: list[str] = []
    fed, called = Module("a", log), Module("b", log)
    ahead = counting([fed, called])
    for batches in (3, 1):
        for batch in range(batches):
            for number in (0, 1) if batch == 0 else (batch + 1,):
                if number < batches:
                    ahead.sent(fed)
            if plain_first:
                call(ahead, called)
            look_up(ahead, [fed])
            if not plain_first:
                call(ahead, called)
        assert log == ["b sends"] * (batches - 1) + ["end a", "b sends", "heard a"]
        log.clear()


def test_in_the_first_step_all_modules_are_waited_for() -> None:
    log: list[str] = []
    fed, called = Module("a", log), Module("b", log)
    ahead = counting([fed, called])
    ahead.sent(fed)
    look_up(ahead, [fed])
    call(ahead, called)
    assert log == ["end a", "b sends", "heard a"]


def test_after_an_error_counting_begins_anew() -> None:
    """A rank that had more batches than others has sent one that nobody will look up."""
    log: list[str] = []
    modules = [Module("a", log)]
    ahead = counting(modules)
    for _ in range(3):
        ahead.sent(modules[0])
    look_up(ahead, modules)
    ahead.forget()
    pipeline(ahead, modules, 1)
    assert log == ["end a", "heard a"]


def test_an_error_in_a_call_does_not_last() -> None:
    log: list[str] = []
    modules = [Module("a", log)]
    ahead = counting(modules)
    with pytest.raises(KeyError), ahead.call(modules[0]):
        raise KeyError
    pipeline(ahead, modules, 2)
    assert log == ["end a", "heard a"]


def test_every_model_is_counted_by_itself() -> None:
    modules, env, log = ModuleSet(), object(), list[str]()

    def add(path: str, env: object = env) -> BatchesAhead[PipelinedModule]:
        return modules.add(cast(PipelinedModule, Module(path, log)), [path], env, path)

    first = add("a")
    assert add("b") is first  # another module of the model
    second = add("a")
    assert second is not first  # of another model: the first one has such a module
    assert add("c", object()) is not second  # of another one: sharded in another environment
    module = cast(PipelinedModule, Module("d", log))
    third = modules.add(module, ["d"], env, "d")
    third.sent(module)
    assert add("e") is not third  # of another one: the first one is trained already
    assert modules.features == {"a", "b", "c", "d", "e"}


def test_what_was_not_heard_is_heard_before_the_next_batch() -> None:
    """The second module was not called in the last step."""
    log: list[str] = []
    modules = [Module("a", log), Module("b", log)]
    ahead = counting(modules)
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
    earlier, later = [Module("old", [])], [Module("a", log)]
    ahead = counting(earlier)
    pipeline(ahead, earlier, 3)
    if collected:
        earlier.clear()
        gc.collect()
    ahead.register(later[0])
    pipeline(ahead, later, batches)
    assert log == ["end a", "heard a"]
