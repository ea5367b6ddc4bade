"""What the files of prepared data are called, and the columns that all of them have."""

__all__ = ["LABEL", "MANIFEST", "WEIGHTS"]

MANIFEST = "manifest.json"
LABEL = "label"
WEIGHTS = ".weights"  # behind the name of a feature: the column of its weights
