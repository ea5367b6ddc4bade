"""CPU functions that compute what operators would compute on the device.

Most operators of torch and FBGEMM have a CPU implementation, and need nothing here.  For others,
and for those whose outputs have another shape on CPU, somebody says what comes out:

    @oracle("fusedrec::number_rows")
    def number_rows(ids_N, starts_S):
        return keys_U, inverse_N

The function has the operator's arguments, by the names of its schema, as CPU tensors that are
copies.  What it returns is written into the outputs that the operator has made on the device, and
must have their shapes and types; if it returns fewer, the other outputs stay as they are.
Arguments that the schema says are written to are copied back, so that the function changes them in
place.  ``LEAVE`` leaves everything as the device has it.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["LEAVE", "ORACLES", "Oracle", "oracle"]

Oracle = Callable[..., Any]
LEAVE = object()
"""What an oracle returns if outputs and arguments are to stay as they are."""

ORACLES: dict[str, Oracle] = {}
"""Oracles by the operator's name with its namespace, with or without an overload."""


def oracle(*names: str) -> Callable[[Oracle], Oracle]:
    """Makes a function the oracle of operators."""

    def register(function: Oracle) -> Oracle:
        ORACLES.update(dict.fromkeys(names, function))
        return function

    return register
