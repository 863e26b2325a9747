"""Write docs/performance.md and its figure from what pytest-benchmark stored."""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
LIBRARIES = ("mechicl", "torch", "numpy", "xarray", "zarr", "transformer-lens")
TITLES = {
    "training": "Training, in turns with the usual way",
    "floor": "The floor of a step",
    "store": "The store",
    "shell": "Waiting",
    "studies": "Studies of many runs",
    "growth": "Cost as the work grows",
}
AXES = {"seeds": "seeds", "L": "context length L", "d": "dimension d", "H": "heads H"}


def main(stored: str) -> None:
    """Turn one JSON file into the page."""
    data = json.loads(Path(stored).read_text())
    rows = [row for bench in data["benchmarks"] for row in bench["extra_info"].get("rows", [])]
    cpu = data["machine_info"]["cpu"]
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    lines = [
        "# Performance",
        "",
        f"Measured on {data['datetime'][:10]} by `make bench`: {cpu['brand_raw']}, "
        f"{cpu['count']} cores, Python {platform.python_version()}, {versions}.",
        "",
        "Ratios are of figures taken in turns in one run, median and range over the turns; "
        "absolute figures drift with the machine.",
    ]
    for section, title in TITLES.items():
        chosen = [row for row in rows if row["section"] == section]
        if chosen and section != "growth":
            lines += ["", f"## {title}", "", *_table(chosen)]
    growth = [row for row in rows if row["section"] == "growth"]
    if growth:
        lines += ["", f"## {TITLES['growth']}", "", *_table(growth, hidden=("axis", "size"))]
        lines += ["", "![Microseconds of a seed-step](images/growth.png)"]
        _draw(growth).savefig(DOCS / "images" / "growth.png", dpi=100)
    lines += ["", *(DOCS / "performance-notes.md").read_text().splitlines()]
    (DOCS / "performance.md").write_text("\n".join(lines) + "\n")


def _table(rows: list[dict[str, Any]], hidden: tuple[str, ...] = ()) -> list[str]:
    """Make a Markdown table of each run of rows with the same columns."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        own = [key for key in row if key not in ("section", *hidden)]
        if own != columns:
            columns = own
            lines += [""] * bool(lines)
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines.append(f"| {' | '.join(_cell(row[key]) for key in columns)} |")
    return lines


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _draw(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 3), layout="constrained")
    panels = figure.subplots(1, len(AXES))
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        chosen = [row for row in rows if row["axis"] == axis]
        sizes = [row["size"] for row in chosen]
        cost = [row["us_per_seed_step"] for row in chosen]
        panel.loglog(sizes, cost, "o-", color="C0")
        panel.loglog(
            sizes,
            [cost[-1] * size / sizes[-1] for size in sizes],
            ":",
            color="0.5",
            label="slope 1",
        )
        panel.set_xlabel(label)
        panel.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        panel.minorticks_off()
        panel.legend(fontsize=8)
    panels[0].set_ylabel("µs a seed-step")
    return figure


if __name__ == "__main__":
    main(sys.argv[1])
