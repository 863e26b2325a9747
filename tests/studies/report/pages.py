"""Reading a page: its elements, and what it asks of a network."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

EVIL = "<script>alert(1)<\\script> & \"quotes\" 'too'"
"""No part of a page, wherever it comes from; as a path has no slash, neither has this."""

_VOID = {"meta", "img", "br", "hr", "link", "input"}
_SOURCES = {"src", "href", "srcset", "data", "action", "poster"}


class Element(NamedTuple):
    tag: str
    attrs: dict[str, str | None]
    text: str


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[list] = []
        self.open: list[list] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        element = [tag, dict(attrs), ""]
        self.found.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element[2] += data


class Page:
    """A page, parsed; every element must be closed."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        reader = _Reader()
        reader.feed(self.source)
        reader.close()
        assert reader.open == []
        self.elements = [Element(*each) for each in reader.found]

    def all(self, tag: str, **attrs: str) -> list[Element]:
        return [
            each
            for each in self.elements
            if each.tag == tag and attrs.items() <= each.attrs.items()
        ]

    def one(self, tag: str, **attrs: str) -> Element:
        (found,) = self.all(tag, **attrs)
        return found

    def section(self, id: str) -> str:
        """The source of one section."""
        (found,) = re.findall(rf'<section id="{id}".*?</section>', self.source, re.DOTALL)
        return found

    def rows(self, caption: str) -> list[list[str]]:
        """The cells of the one table with this caption, heading row first."""
        (table,) = [
            each for each in re.findall(r"<table.*?</table>", self.source, re.DOTALL)
            if f">{caption}</caption>" in each
        ]  # fmt: skip
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
        return [[html.unescape(cell) for cell in row] for row in cells]

    def fetched(self) -> list[str]:
        """What a browser would fetch from elsewhere."""
        found = [
            str(value)
            for each in self.elements
            for key, value in each.attrs.items()
            if key in _SOURCES and not str(value).startswith(("data:image/png;base64,", "#"))
        ]
        styles = "".join(each.text for each in self.all("style"))
        return found + re.findall(r"url\(|@import", styles)
