"""`mechicl reproduce`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechicl.cli.options import Compile, Device, Json, Plot

if TYPE_CHECKING:
    from mechicl.studies import Record
    from mechicl.studies.reproduce import Quantity


def reproduce(
    claims: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CLAIM]...",
            help="Claims, papers, `all`, or YAML files; none lists what there is.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Size of the recipes, such as paper.", show_default="their own"),
    ] = None,
    out: Annotated[str, typer.Option(help="Where runs and records are kept.")] = "runs/reproduce",
    device: Device = "auto",
    compile: Compile = True,
    plot: Plot = True,
    json: Json = False,
) -> int:
    """Test what the papers claim: train or reuse the runs, measure, compare, and say what holds."""
    from mechicl import studies
    from mechicl.cli import progress

    if not claims:
        _list(json)
        return 0
    found = []
    for record in studies.reproduce(
        claims,
        out,
        scale=scale,
        device=device,
        compile=compile,
        figure=plot,
        watch=progress.watch,
        notify=progress.say,
    ):
        found.append(record)
        if not json:
            _show(record)
    if json:
        _print([record.document() for record in found])
    elif len(found) > 1:
        _show_all(found)
    return 1 if any(record.verdict == "not reproduced" for record in found) else 0


def _print(document: Any) -> None:
    import json

    print(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))


def _list(as_json: bool) -> None:
    from mechicl.cli.tables import show
    from mechicl.studies import claim_names, load_claim

    claims = [load_claim(name) for name in claim_names()]
    if as_json:
        _print([claim.model_dump(mode="json") for claim in claims])
        return
    rows = [[claim.id, claim.source, claim.statement] for claim in claims]
    show("claims (mechicl reproduce ID)", ["id", "source", "statement"], rows)


def _show(record: "Record") -> None:
    from mechicl.cli.tables import show

    rows = [_row(record, each) for each in record.quantities]
    columns = ["quantity", "published", "measured [least, largest]", "tolerance", "met", "verdict"]
    show(f"{record.claim.id}: {record.verdict}", columns, rows)
    print(f"  {record.claim.statement} ({record.claim.source})")
    for reason, seeds in _excluded(record).items():
        print(f"  left out, {reason}: {'; '.join(seeds)}")
    if record.figure is not None:
        print(f"  figure: {record.figure}")
    print()


def _row(record: "Record", quantity: "Quantity") -> list[str]:
    published, tolerance, met, verdict = "", "", "", ""
    if quantity.verdict is not None:
        published, verdict = _number(quantity.published), quantity.verdict
        tolerance = _tolerance(record.claim.comparison, quantity.tolerance)
        low, high = quantity.interval
        met = f"{quantity.n_met} of {quantity.n_counted}"
        if quantity.n_counted > 1:
            met += f" [{low:.2f}, {high:.2f}]"
    return [quantity.name, published, _measured(quantity), tolerance, met, verdict]


def _measured(quantity: "Quantity") -> str:
    import numpy as np

    values = quantity.counted
    if values.size == 0:
        return "no seed counts"
    if values.size == 1:
        error = next(each.error for each in quantity.measurements if not each.excluded)
        return _number(values[0]) + ("" if error is None else f" ± {_number(error)}")
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return "undefined"
    spread = f"{_number(finite.mean())} [{_number(finite.min())}, {_number(finite.max())}]"
    return spread + (
        f", {values.size - finite.size} undefined" if finite.size < values.size else ""
    )


def _tolerance(comparison: str, tolerance: float | None) -> str:
    assert tolerance is not None
    if comparison == "relative":
        return f"± {100 * tolerance:.3g} %"
    if comparison == "absolute":
        return f"± {tolerance:.3g}"
    return f"at {comparison.removeprefix('at_')}, within {tolerance:.3g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _excluded(record: "Record") -> dict[str, list[str]]:
    """Return the seeds that do not count, by the reason."""
    found: dict[str, list[str]] = {}
    for quantity in record.quantities:
        if quantity.verdict is None:
            continue
        for reason in dict.fromkeys(each.excluded for each in quantity.measurements):
            seeds = [str(each.seed) for each in quantity.measurements if each.excluded == reason]
            if reason:
                found.setdefault(reason, []).append(f"{quantity.name}, seeds {', '.join(seeds)}")
    return found


def _show_all(records: list["Record"]) -> None:
    from mechicl.cli.tables import show

    rows = []
    for record in records:
        stated = [each for each in record.quantities if each.verdict is not None]
        met, counted = sum(each.n_met for each in stated), sum(each.n_counted for each in stated)
        left = sum(bool(one.excluded) for each in stated for one in each.measurements)
        rows.append([record.claim.id, record.verdict, f"{met} of {counted}", str(left or "")])
    show("claims", ["id", "verdict", "values met", "left out"], rows)
