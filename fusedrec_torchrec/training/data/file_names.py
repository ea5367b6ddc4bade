"""What the files of prepared data are called."""

__all__ = ["MANIFEST"]

MANIFEST = "manifest.json"
