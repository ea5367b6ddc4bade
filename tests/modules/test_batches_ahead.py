"""Which lookups come after the end of a rank's data: by counting alone."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from fusedrec_torchrec.modules.batches_ahead import BatchesAhead


class Module:
    """Writes down what it sends."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def send_end_of_data(self) -> Any:
        self.log.append(f"end {self.name}")
        return self

    def wait(self) -> None:
        self.log.append(f"heard {self.name}")


def pipeline(ahead: BatchesAhead, modules: list[Module], batches: int) -> None:
    """As TorchRec's: the ids of the next batch are sent before a batch is looked up."""
    for batch in range(batches):
        for number in (0, 1) if batch == 0 else (batch + 1,):
            if number < batches:
                for module in modules:
                    ahead.sent(module)
        look_up(ahead, modules)


def plain(ahead: BatchesAhead, modules: list[Module], batches: int) -> None:
    for _ in range(batches):
        for module in modules:
            ahead.sent(module)
            ahead.used(module)
            ahead.rows_arrived()


def look_up(ahead: BatchesAhead, modules: list[Module]) -> None:
    for module in modules:
        ahead.used(module)
        ahead.rows_arrived()


def test_all_modules_say_it_once_in_the_order_of_their_batches() -> None:
    log: list[str] = []
    modules = [Module("a", log), Module("b", log)]
    pipeline(BatchesAhead(), modules, 4)
    assert log == ["end a", "end b", "heard a", "heard b"]


def test_every_epoch_ends() -> None:
    log: list[str] = []
    ahead, modules = BatchesAhead(), [Module("a", log)]
    for _ in range(3):
        pipeline(ahead, modules, 2)
    assert log == ["end a", "heard a"] * 3


@pytest.mark.parametrize("run", [plain, lambda ahead, modules, _: pipeline(ahead, modules, 1)])
def test_nothing_is_said_where_nothing_is_ahead(run: Callable[..., None]) -> None:
    log: list[str] = []
    ahead, modules = BatchesAhead(), [Module("a", log), Module("b", log)]
    for _ in range(3):
        run(ahead, modules, 3)
    assert log == []


def test_a_module_that_is_called_in_a_plain_way_is_waited_for() -> None:
    """Other ranks wait for its ids, so this rank must not raise before it has sent them."""
    log: list[str] = []
    ahead, first, second = BatchesAhead(), Module("a", log), Module("b", log)
    for batch in range(3):
        for number in (0, 1) if batch == 0 else (batch + 1,):
            if number < 3:
                ahead.sent(first)
        look_up(ahead, [first])
        ahead.sent(second)
        log.append("b sends")
        look_up(ahead, [second])
    assert log == ["b sends", "b sends", "end a", "b sends", "heard a"]


def test_what_was_not_heard_is_heard_before_the_next_batch() -> None:
    """The second module was not called in the last step."""
    log: list[str] = []
    ahead, modules = BatchesAhead(), [Module("a", log), Module("b", log)]
    for module in [*modules, *modules]:
        ahead.sent(module)
    look_up(ahead, modules)
    look_up(ahead, modules[:1])
    assert log == ["end a", "end b"]
    ahead.sent(modules[0])
    assert log == ["end a", "end b", "heard a", "heard b"]


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_garbage_of_an_earlier_model_makes_no_difference(collected: bool, batches: int) -> None:
    """Ranks collect it at different times, and must still say the same."""
    log: list[str] = []
    ahead, earlier = BatchesAhead(), [Module("old", [])]
    pipeline(ahead, earlier, 3)
    if collected:
        earlier.clear()
        gc.collect()
    pipeline(ahead, [Module("a", log)], batches)
    assert log == ([] if batches == 1 else ["end a", "heard a"])


def test_stock_tables_silence_it() -> None:
    log: list[str] = []
    ahead = BatchesAhead()
    ahead.deactivate()
    pipeline(ahead, [Module("a", log)], 3)
    assert log == []
