"""Torch's dispatcher: who sees every operator, and what an operator is called."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "argument_names", "operator_name"]


def operator_name(operator: Any) -> str:
    """Returns the name of an operator without its namespace."""
    return str(operator._schema.name.partition("::")[2])


def argument_names(operator: Any) -> list[str]:
    """Returns the names of an operator's arguments."""
    return [argument.name for argument in operator._schema.arguments]
