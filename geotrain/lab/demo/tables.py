"""Rows and tables that keep to their terminal's width. Pure."""

from rich.table import Table
from rich.text import Text

DIM = "dim"
NAME_WIDTH = 10


def line_of(*parts: str | tuple[str, str]) -> Text:
    text = Text.assemble(*parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def table_of(*words_of: str, figures: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for column in words_of:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True, overflow="ellipsis")
    return table
