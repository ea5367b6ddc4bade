"""Shows what prepared data holds."""

from typing import Any

from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.prepared_files import features_of

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
    """Prints samples, tables, features and lines that were left out."""
    manifest = data.manifest
    rows: list[tuple[str, object]] = [
        ("samples", data.samples),
        ("clicks", f"{manifest['clicks'] / data.samples:.2%}"),
        ("dense features", data.dense_features),
        ("tables", len(data.table_rows)),
        ("rows of all tables", sum(data.table_rows.values())),
        ("parts", len(manifest["parts"])),
        ("malformed lines left out", sum(manifest["bad_lines"]["counts"].values())),
    ]
    if data.held_out is not None:
        rows.insert(1, ("of them held out", data.held_out))
    print_table(f"prepared data {data.folder}", ("", ""), rows)
    print_table("tables", ("name", "rows"), list(data.table_rows.items()))
    if "features" in manifest:
        kinds = {False: "one id", True: "bags"}
        features = [
            (f.name, f.table, kinds[f.bag] + (" with weights" if f.weights else ""))
            for f in features_of(manifest)
        ]
        print_table("features", ("name", "table", "a sample has"), features)
    if manifest["bad_lines"]["counts"]:
        print_table(
            "malformed lines", ("reason", "lines"), list(manifest["bad_lines"]["counts"].items())
        )
        for example in manifest["bad_lines"]["examples"]:
            print(f"  {example}")
