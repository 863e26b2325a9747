"""Figures for a page: PNG, inside the page as text."""

import json
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

import xarray as xr
from matplotlib.figure import Figure
from PIL import Image as pillow

from mechicl import analyses

BUDGET = 1_600_000
"""Bytes that the figures of a page take in it, at most but for what cannot be made smaller."""
_DPI = 110
_LEAST_DPI = 40
_BROAD = 1.7


class Image(NamedTuple):
    """A figure as a `data:` URL, and its size in pixels."""

    data: str
    width: int
    height: int

    @property
    def broad(self) -> bool:
        """Whether it is so wide that a narrow screen makes it hard to read."""
        return self.width > _BROAD * self.height


def embedded(drawn: Mapping[str, Figure]) -> tuple[dict[str, Image], str | None]:
    """Return figures as they are inside a page, and what had to be done to make them fit.

    They are drawn at 110 dots an inch, and at fewer where they would take more than `BUDGET`.
    """
    dpi = _DPI
    while True:
        found = {name: _image(figure, dpi) for name, figure in drawn.items()}
        total = sum(map(len, (each.data for each in found.values())))
        if total <= BUDGET or dpi == _LEAST_DPI:
            break
        dpi = max(_LEAST_DPI, min(int(dpi * (BUDGET / total) ** 0.5), dpi - 5))
    note = None
    if dpi < _DPI:
        note = f"figures are drawn at {dpi} dots an inch in place of {_DPI}, to keep the page small"
    return found, note


def _image(figure: Figure, dpi: int) -> Image:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png", pil_kwargs={"optimize": True})
    width, height = pillow.open(drawn).size
    text = b64encode(drawn.getvalue()).decode()
    return Image(f"data:image/png;base64,{text}", width, height)


def described(name: str, result: xr.Dataset, image: Image) -> dict[str, Any]:
    """Return what a page says below the figure of a result: summary, statement, what is undefined.

    Of a probe that is not installed any more there is no summary.
    """
    counts = json.loads(result.attrs.get("n_undefined", "{}"))
    total = f" of {result['undefined'].size:,}" if "undefined" in result else ""
    undefined = [
        f"{reason.replace('_', ' ')} ({n:,}{total} checkpoints)"
        for reason, n in counts.items()
        if n
    ]
    known = name in analyses.names()
    return {
        "name": name,
        "image": image,
        "summary": analyses.get(name).summary if known else "",
        "statement": result.attrs.get("statement", ""),
        "undefined": ", ".join(undefined),
    }
