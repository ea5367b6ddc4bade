"""Shows what prepared data holds."""

from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.training.data.prepared import PreparedData

__all__ = ["print_prepared"]


def print_prepared(data: PreparedData) -> None:
    """Prints samples, tables and lines that were left out."""
    manifest = data.manifest
    print_table(
        f"prepared data {data.folder}",
        ("", ""),
        [
            ("samples", data.samples),
            ("clicks", f"{manifest['clicks'] / data.samples:.2%}"),
            ("dense features", data.dense_features),
            ("tables", len(data.table_rows)),
            ("rows of all tables", sum(data.table_rows.values())),
            ("parts", len(manifest["parts"])),
            ("malformed lines left out", sum(manifest["bad_lines"]["counts"].values())),
        ],
    )
    print_table("tables", ("name", "rows"), list(data.table_rows.items()))
    if manifest["bad_lines"]["counts"]:
        print_table(
            "malformed lines", ("reason", "lines"), list(manifest["bad_lines"]["counts"].items())
        )
        for example in manifest["bad_lines"]["examples"]:
            print(f"  {example}")
