"""Writes torch.distributed.checkpoint's files, with a checksum of each and a manifest.

Ranks hash what they have written, and send the hashes along with the results that
torch.distributed.checkpoint gathers anyway.  The manifest is written last.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fusedrec_torchrec.checkpoint.file_names import MANIFEST
from fusedrec_torchrec.checkpoint.manifest import Manifest
from fusedrec_torchrec.checkpoint.verify import checksum
from fusedrec_torchrec.compat.distributed_checkpoint import StorageInfo
from fusedrec_torchrec.core.files import sync_file

__all__ = ["CheckedWriter", "sync_folder"]


@dataclass
class _CheckedStorageInfo(StorageInfo):
    """Where a result is stored, and the checksum of that file."""

    checksum: dict[str, Any] | None = None


class CheckedWriter(FileSystemWriter):
    """Writes a checkpoint of torch.distributed.checkpoint with checksums and a manifest.

    Args:
        path: folder to write to; other files in it get checksums, too.
        manifest: what to write into it, but for the checksums of files.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files; the results have their checksums."""
        results = super().write_data(plan, planner).value()
        folder = Path(self.path)
        names = dict.fromkeys(result.storage_data.relative_path for result in results)
        sums = {name: checksum(folder / name) for name in names}
        checked: Future[list[WriteResult]] = Future()
        checked.set_result(
            [
                WriteResult(
                    result.index,
                    result.size_in_bytes,
                    _CheckedStorageInfo(
                        **vars(result.storage_data),
                        checksum=sums[result.storage_data.relative_path],
                    ),
                )
                for result in results
            ]
        )
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata, and then the manifest with the checksums of all ranks' files."""
        files: dict[str, dict[str, Any]] = {}
        plain = []
        for rank_results in results:
            for result in rank_results:
                info = vars(result.storage_data).copy()
                files[info["relative_path"]] = info.pop("checksum")
                plain.append(WriteResult(result.index, result.size_in_bytes, StorageInfo(**info)))
        super().finish(metadata, [plain])
        folder = Path(self.path)
        for path in sorted(folder.iterdir()):
            if path.name not in (*files, MANIFEST) and not path.name.endswith(".tmp"):
                sync_file(path)
                files[path.name] = checksum(path)
        replace(self._manifest, files=dict(sorted(files.items()))).write(folder)
        sync_folder(folder)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder outlive a power failure, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
