"""The types of numbers that a checkpoint can have, by the names that files give them."""

import torch

__all__ = ["DTYPES", "STORAGES", "UNTYPED"]

DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "bool", "complex64", "complex128"),
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
STORAGES: dict[str, torch.dtype] = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
}
UNTYPED = "torch.storage.UntypedStorage"
