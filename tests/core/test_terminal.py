"""Names of others on a terminal."""

import io

from fusedrec_torchrec.core.terminal import print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_in_brackets_are_no_markup() -> None:
    file = Terminal()
    print_table("tables", ("name", "rows"), [("[red]a[/b]", 3)], file)
    assert "[red]a[/b]" in file.getvalue()
