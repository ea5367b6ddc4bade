"""Text in Criteo's format, made for tests."""

import gzip
import random
from pathlib import Path


def line(label: int = 0, integer: str = "3", category: str = "0000002a") -> str:
    return "\t".join([str(label), *[integer] * 13, *[category] * 26])


def lines(count: int, seed: int = 0, values: int = 40) -> list[str]:
    """Random well-formed lines with missing values, skewed categories and negative integers."""
    generator = random.Random(seed)
    result = []
    for _ in range(count):
        integers = [
            "" if generator.random() < 0.2 else str(generator.randint(-2, 5000)) for _ in range(13)
        ]
        categories = [
            ""
            if generator.random() < 0.1
            else f"{(int(values * generator.random() ** 3) * 2654435761 + column) % 2**32:08x}"
            for column in range(26)
        ]
        result.append("\t".join([str(generator.randint(0, 1)), *integers, *categories]))
    return result


def write(path: Path, content: list[str], end: str = "\n") -> Path:
    data = "".join(text + end for text in content).encode(errors="surrogateescape")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
