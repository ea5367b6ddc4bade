"""Reads a pickle as a description: nothing that it names is looked up, called or changed.

Python's own unpickler is a machine that calls what a file tells it to call and sets attributes of
what a file tells it to change.  This one only writes down what it was told.  A name of a class or
function stays a ``Name``, a call becomes a ``Call``, a dict stays a list of pairs, so that nothing
is hashed either.  Whoever wants objects makes them of that, field by field.

It knows the opcodes that Python and torch write for plain data and instances, of protocols 2 to 5,
and refuses all others.  Every opcode makes at most one object, of no more than the bytes it has in
the file, so memory is bounded by the size of the file.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from struct import unpack_from
from typing import Any

from fusedrec_torchrec.core.folder_files import shown

__all__ = ["Call", "Name", "Pairs", "Persistent", "read_pickle"]

PROTOCOLS = (2, 3, 4, 5)
DEEPEST_MARKS = 100  # containers that are open at the same time
LARGEST_STACK = 1 << 20  # objects that wait for their container
LONGEST_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant that a pickle names, with its module before it."""

    full: str


class Pairs(list[tuple[Any, Any]]):
    """A dict, as the pairs of key and value that were put into it."""

    __slots__ = ()


class Call:
    """An object that a pickle makes by calling something.

    Attributes:
        name: full name of what it calls.
        arguments: of the call.
        state: the state that it wants to give to the object, None if it does not.
        items: the items that it wants to put into the object.
    """

    __slots__ = ("arguments", "items", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None
        self.items: Pairs | None = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """What a pickle refers to and does not hold; torch's are storages."""

    identity: Any


def read_pickle(content: bytes, allowed: frozenset[str]) -> Any:
    """Returns the description of the object in a pickle.

    Args:
        content: of a file.
        allowed: full names that it may have.

    Raises:
        ValueError: it is damaged, or has a name or an opcode that is not allowed.
    """
    machine = _Machine(content, allowed)
    try:
        return machine.run()
    except IndexError:  # of the content, the stack or the marks
        raise ValueError(f"it is damaged at byte {machine.at}: something is missing") from None


class _Machine:
    """The stack machine of a pickle, whose opcodes only write down what they were told."""

    def __init__(self, content: bytes, allowed: frozenset[str]) -> None:
        self.content, self.allowed = content, allowed
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, stack = self.content, self.stack
        while True:
            code = content[self.at]
            self.at += 1
            if code == STOP:
                return stack.pop()
            step = STEPS.get(code)
            if step is None:
                raise ValueError(f"it has opcode {bytes([code])!r}, which no checkpoint needs")
            step(self)
            if len(stack) > LARGEST_STACK:
                raise ValueError(f"it has more than {LARGEST_STACK} objects in one")

    def take(self, count: int) -> bytes:
        """Returns the next bytes."""
        end = self.at + count
        if end > len(self.content):
            raise ValueError(f"it is truncated: {count} bytes are missing at byte {self.at}")
        taken = self.content[self.at : end]
        self.at = end
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, size: int) -> str:
        try:
            return self.take(self.number(size)).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"it is damaged at byte {self.at}: {error}") from None

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("it is damaged: a name is no text")
        full = f"{module}.{name}"
        if len(full) > LONGEST_NAME or full not in self.allowed:
            raise ValueError(f"it names {shown(full)[1:-1]}, which no checkpoint needs")
        self.stack.append(Name(full))

    # ------------------------------------------------------------ opcodes

    def protocol(self) -> None:
        version = self.number(1)
        if version not in PROTOCOLS:
            raise ValueError(f"it has protocol {version}, must be one of {PROTOCOLS}")

    def frame(self) -> None:
        if self.number(8) > len(self.content) - self.at:
            raise ValueError("it is truncated: a frame ends after its end")

    def mark(self) -> None:
        if len(self.marks) >= DEEPEST_MARKS:
            raise ValueError(f"it nests more than {DEEPEST_MARKS} objects")
        self.marks.append(len(self.stack))

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple_1(self) -> None:
        self.stack.append((self.stack.pop(),))

    def tuple_2(self) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.stack.append((first, second))

    def tuple_3(self) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append((first, second, third))

    def tuple_n(self) -> None:
        self.stack.append(tuple(self.since_mark()))

    def empty_list(self) -> None:
        self.stack.append([])

    def empty_dict(self) -> None:
        self.stack.append(Pairs())

    def append(self) -> None:
        self._extend([self.stack.pop()])

    def appends(self) -> None:
        self._extend(self.since_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def set_items(self) -> None:
        self._put(self.since_mark())

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Call and target.items is None:
            target.items = Pairs()
        pairs = target.items if type(target) is Call else target
        if type(pairs) is not Pairs or len(items) % 2:
            raise ValueError("it puts items into what is no dict")
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise ValueError("it calls what is no name")
        self.stack.append(Call(name.full, arguments))

    def build(self) -> None:
        """Gives a state to an object, which must be a new one."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Call or target.state is not None or state is None:
            what = target.full if type(target) is Name else type(target).__name__
            raise ValueError(f"it sets attributes of {what}, which is no new instance")
        target.state = state

    def global_name(self) -> None:
        lines = []
        for _ in range(2):
            end = self.content.find(b"\n", self.at, self.at + LONGEST_NAME)
            if end < 0:
                raise ValueError(f"it is damaged at byte {self.at}: a name has no end")
            lines.append(self.content[self.at : end].decode("ascii", "replace"))
            self.at = end + 1
        self.push_name(*lines)

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_name(module, name)

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put_1(self) -> None:
        self.memo[self.number(1)] = self.stack[-1]

    def put_4(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def get_1(self) -> None:
        self._get(self.content[self.at])
        self.at += 1

    def get_4(self) -> None:
        at = self.at
        self.at = at + 4
        self._get(int.from_bytes(self.content[at : at + 4], "little"))

    def _get(self, place: int) -> None:
        if place not in self.memo:
            raise ValueError(f"it is damaged at byte {self.at}: it refers to nothing")
        self.stack.append(self.memo[place])

    def persistent(self) -> None:
        self.stack.append(Persistent(self.stack.pop()))

    def int_1(self) -> None:
        self.stack.append(self.content[self.at])
        self.at += 1

    def int_2(self) -> None:
        at = self.at
        self.stack.append(self.content[at] | self.content[at + 1] << 8)
        self.at = at + 2

    def int_4(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long_1(self) -> None:
        self.stack.append(pickle.decode_long(self.take(self.number(1))))

    def float_8(self) -> None:
        self.stack.append(unpack_from(">d", self.take(8))[0])

    def text_1(self) -> None:
        self.stack.append(self.text(1))

    def text_4(self) -> None:
        self.stack.append(self.text(4))

    def bytes_1(self) -> None:
        self.stack.append(self.take(self.number(1)))

    def bytes_4(self) -> None:
        self.stack.append(self.take(self.number(4)))

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)


STOP = pickle.STOP[0]
STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in {
        pickle.PROTO: _Machine.protocol,
        pickle.FRAME: _Machine.frame,
        pickle.MARK: _Machine.mark,
        pickle.EMPTY_TUPLE: _Machine.empty_tuple,
        pickle.TUPLE1: _Machine.tuple_1,
        pickle.TUPLE2: _Machine.tuple_2,
        pickle.TUPLE3: _Machine.tuple_3,
        pickle.TUPLE: _Machine.tuple_n,
        pickle.EMPTY_LIST: _Machine.empty_list,
        pickle.EMPTY_DICT: _Machine.empty_dict,
        pickle.APPEND: _Machine.append,
        pickle.APPENDS: _Machine.appends,
        pickle.SETITEM: _Machine.set_item,
        pickle.SETITEMS: _Machine.set_items,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.call,
        pickle.BUILD: _Machine.build,
        pickle.GLOBAL: _Machine.global_name,
        pickle.STACK_GLOBAL: _Machine.stack_global,
        pickle.MEMOIZE: _Machine.memoize,
        pickle.BINPUT: _Machine.put_1,
        pickle.LONG_BINPUT: _Machine.put_4,
        pickle.BINGET: _Machine.get_1,
        pickle.LONG_BINGET: _Machine.get_4,
        pickle.BINPERSID: _Machine.persistent,
        pickle.BININT1: _Machine.int_1,
        pickle.BININT2: _Machine.int_2,
        pickle.BININT: _Machine.int_4,
        pickle.LONG1: _Machine.long_1,
        pickle.BINFLOAT: _Machine.float_8,
        pickle.SHORT_BINUNICODE: _Machine.text_1,
        pickle.BINUNICODE: _Machine.text_4,
        pickle.SHORT_BINBYTES: _Machine.bytes_1,
        pickle.BINBYTES: _Machine.bytes_4,
        pickle.NONE: _Machine.none,
        pickle.NEWTRUE: _Machine.true,
        pickle.NEWFALSE: _Machine.false,
    }.items()
}
