"""Tables on the terminal."""

import sys
from collections.abc import Sequence

_UNBOUNDED = 1000  # columns: what is piped into a file or a pager is not folded at 80


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output; the last column wraps where a terminal is too narrow."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error that rich is handling, and would turn into exit code 1

    if sys.stdout is None:  # closed by whoever called
        return
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
    )
    for column in columns[:-1]:
        table.add_column(column, overflow="fold", no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    width = None if sys.stdout.isatty() else _UNBOUNDED
    _Console(width=width).print(table)
