"""Prepares data as parquet that trains at full speed: ``fusedrec prepare``.

The data may be Criteo's text or files with columns of their own; ``preparation`` does the work,
which is the same for both.
"""

from collections.abc import Sequence
from pathlib import Path

from fusedrec_torchrec.training.data.criteo_source import CriteoSource
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.data.lines import find_files
from fusedrec_torchrec.training.data.preparation import (
    How,
    Preparation,
    changed_options,
    prepared_otherwise,
)
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.spelling import Spelling, as_argument
from fusedrec_torchrec.training.data.table_files import find_table_files, is_there
from fusedrec_torchrec.training.data.table_options import TableOptions
from fusedrec_torchrec.training.data.table_source import TableSource, options_of

__all__ = ["prepare", "prepare_table"]


def prepare(
    paths: Sequence[str | Path],
    output: str | Path,
    options: PrepareOptions | None = None,
    progress: bool = True,
    spelling: Spelling = as_argument,
) -> PreparedData:
    """Prepares text in Criteo's format into the folder ``output``; at once if that was done before.

    Several processes may call it for the same folder: one works, the others wait for it.

    Args:
        paths: text files, or folders of them.
        output: folder of the prepared data.
        options: how text becomes parquet.
        progress: whether to show bars.
        spelling: how messages spell a setting for whoever reads them.

    Raises:
        ValueError: files missing, empty or malformed, or ``output`` holds something else.
        OSError: a file that cannot be read or written, by its name.
    """
    if (Path(output) / MANIFEST).is_file() and not any(Path(path).exists() for path in paths):
        return _prepared_before(paths, Path(output))  # the text is not needed any more
    files = find_files(paths)
    options = options or PrepareOptions()
    how = _how(options, progress, spelling)
    return Preparation(CriteoSource(files, options), Path(output), how).run()


def prepare_table(
    options: TableOptions,
    output: str | Path,
    progress: bool = True,
    spelling: Spelling = as_argument,
) -> PreparedData:
    """Prepares files with columns of their own into the folder ``output``, as ``prepare`` does.

    Args:
        options: which files, and how samples are made of their columns.
        output: folder of the prepared data.
        progress: whether to show bars.
        spelling: how messages spell a setting for whoever reads them.

    Raises:
        ValueError: files missing, empty or malformed, columns that are not there or cannot be used,
            or ``output`` holds something else.
        OSError: a file that cannot be read or written, by its name.
    """
    output = Path(output)
    if (output / MANIFEST).is_file() and not any(map(is_there, options.files)):
        data = PreparedData.open(output)
        changes = changed_options(
            data.manifest["identity"].get("options", {}), options_of(options), spelling
        )
        if changes:
            raise ValueError(prepared_otherwise(output, changes))
        return data
    source = TableSource(find_table_files(options.files, options.format), options)
    return Preparation(source, output, _how(options, progress, spelling)).run()


def _how(options: PrepareOptions | TableOptions, progress: bool, spelling: Spelling) -> How:
    """Returns what both kinds of options say about the work itself."""
    return How(
        on_bad_line=options.on_bad_line,
        part_rows=options.part_rows,
        group_rows=options.group_rows,
        memory_mb=options.memory_mb,
        progress=progress,
        spelling=spelling,
    )


def _prepared_before(paths: Sequence[str | Path], output: Path) -> PreparedData:
    data = PreparedData.open(output)
    then = [source["name"] for source in data.manifest["identity"]["sources"]]
    now = [Path(path).name for path in paths]
    if then != now:
        raise ValueError(
            f"data file {paths[0]} does not exist, and {output} was prepared from {', '.join(then)}"
        )
    return data
