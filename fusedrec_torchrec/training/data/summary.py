"""Shows what prepared data holds."""

from typing import Any

from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.training.data.prepared import PreparedData

__all__ = ["prepared_figures", "print_prepared"]


def prepared_figures(data: PreparedData) -> dict[str, Any]:
    """Returns samples, tables and lines that were left out."""
    manifest = data.manifest
    return {
        "folder": data.folder,
        "samples": data.samples,
        "click_rate": manifest["clicks"] / data.samples,
        "dense_features": data.dense_features,
        "tables": dict(data.table_rows),
        "parts": len(manifest["parts"]),
        "malformed_lines": manifest["bad_lines"]["counts"],
        "malformed_examples": manifest["bad_lines"]["examples"],
    }


def print_prepared(data: PreparedData) -> None:
    """Prints the same as tables."""
    figures = prepared_figures(data)
    tables, malformed = figures["tables"], figures["malformed_lines"]
    print_table(
        f"prepared data {data.folder}",
        ("", ""),
        [
            ("samples", figures["samples"]),
            ("clicks", f"{figures['click_rate']:.2%}"),
            ("dense features", figures["dense_features"]),
            ("tables", len(tables)),
            ("rows of all tables", sum(tables.values())),
            ("parts", figures["parts"]),
            ("malformed lines left out", sum(malformed.values())),
        ],
    )
    print_table("tables", ("name", "rows"), list(tables.items()))
    if malformed:
        print_table("malformed lines", ("reason", "lines"), list(malformed.items()))
        for example in figures["malformed_examples"]:
            print(f"  {example}")
