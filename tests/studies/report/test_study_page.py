"""The page of a study: counts over runs, what failed, and a plot against settings."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mechicl
from mechicl.errors import InputError
from mechicl.studies.claims import wilson
from mechicl.studies.report import Report, report, study_page
from mechicl.studies.study import Study
from tests.studies.report.browser import Opened, browser, opened
from tests.studies.report.pages import EVIL, Page

SMALL = {"d": 2, "n_context": 5, "batch_size": 8, "n_steps": 3, "seeds": [0, 1]}
PROBES = ("sign_matching", "circuits")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Runs of one and two heads at rates a hundred apart, a run of another task, and no run."""
    root = tmp_path_factory.mktemp("studies")
    for heads, rate in ((1, 0.0001), (2, 0.0001), (2, 0.01)):
        overrides = SMALL | {"n_heads": heads, "learning_rate": rate}
        path = root / f"heads {heads} rate {rate} {EVIL}"
        mechicl.train("he2025-two-head-quick", path, overrides=overrides, compile=False)
    chain = {"d": 3, "blocks": [1, 1], "n_predictions": 2, "batch_size": 4, "n_steps": 2}
    mechicl.train("yuksel2026-minimal", root / "chain", overrides=chain, compile=False)
    paths = sorted(path for path in root.iterdir())
    return mechicl.study(paths, PROBES, out=root / "pages.zarr", figures=False)


@pytest.fixture(scope="module")
def made(study: Study) -> Report:
    assert study.path is not None
    return report(study.path)


@pytest.fixture(scope="module")
def page(made: Report) -> Page:
    return Page(made.path)


def test_the_page_is_beside_the_study_and_needs_nothing(study: Study, made: Report) -> None:
    assert study.path is not None
    assert made.path == study.path.with_name("pages-report.html")
    assert 1_600_000 < made.path.stat().st_size < 5_000_000
    page = Page(made.path)
    assert page.fetched() == []
    assert len(page.all("h1")) == 1
    assert [str(each.attrs["alt"]).partition(":")[0] for each in page.all("img")] == [*PROBES]


def test_the_lead_counts_runs_and_seeds_of_all_probes(study: Study, tmp_path: Path) -> None:
    """A probe that applies to few runs has few of the seeds."""
    runs = study.runs["run_path"].values.tolist()
    mixed = mechicl.study(runs, ["circuits", "attention_spans"])
    seeds = mixed.table.groupby("run")["seed"].nunique()
    assert seeds.sort_values().tolist() == [2, 2, 2, 4]
    lead = Page(report(mixed, tmp_path / "x.html").path).one("p", **{"class": "lead"}).text
    assert lead == "circuits, attention_spans over 4 runs, 10 seeds"


def test_verdicts_are_counted_over_runs_and_seeds(page: Page, study: Study) -> None:
    head, *rows = page.rows("verdicts of every run and seed at its last step")
    assert head[:4] == ["probe", "holds", "fails", "undefined"]
    for name, *counts in rows:
        frame = study.table[study.table["probe"] == name]
        yes, no = int((frame["holds"] == 1).sum()), int((frame["holds"] == 0).sum())
        assert counts[:3] == [str(yes), str(no), str(len(frame) - yes - no)]
        low, high = wilson(yes, yes + no)
        assert counts[3] == f"{yes / (yes + no):.2f} [{low:.2f}, {high:.2f}]"
    assert [row[0] for row in rows] == [*PROBES]


def test_key_figures_are_those_of_the_table(page: Page, study: Study) -> None:
    _, *rows = page.rows("key figures over every run and seed at its last step")
    frame = study.table[study.table["probe"] == "circuits"]
    (row,) = [row for row in rows if row[:2] == ["circuits", "omega, place 0"]]
    values = frame["omega_0"].dropna().to_numpy()
    expected = f"{np.median(values):.3g} [{values.min():.3g}, {values.max():.3g}]"
    assert row[2:] == [expected, f"{len(values)} of {len(frame)}"]


def test_runs_have_the_settings_in_which_they_differ(page: Page, study: Study) -> None:
    head, *rows = page.rows("runs, and the settings in which they differ")
    assert [row[0] for row in rows] == study.runs["run_name"].values.tolist()
    at = head.index("model.n_heads")
    shown = [row[at] for row in rows]
    assert shown == [f"{int(heads)}" for heads in study.runs["model.n_heads"].values]
    assert "not set" in [cell for row in rows for cell in row], "chains have no noise"
    assert "batch_size" in head


def test_what_gave_nothing_is_told(page: Page, study: Study) -> None:
    _, *rows = page.rows("and why")
    assert [row[1] for row in rows] == sorted(PROBES)
    assert all(row[0].endswith("chain") for row in rows)
    assert all(row[2].startswith("does not apply: the run has no") for row in rows)


def test_names_are_text(page: Page) -> None:
    assert EVIL not in page.source
    assert "<script>alert" not in page.source
    assert page.source.count("</script>") == len(re.findall(r"<script\b", page.source))


def test_some_probes_and_another_place(study: Study, tmp_path: Path) -> None:
    done = report(study, tmp_path / "one.html", probes=["circuits"])
    assert len(Page(done.path).all("img")) == 1
    with pytest.raises(InputError, match="in this study 'routing'"):
        report(study, tmp_path / "two.html", probes=["routing"])
    assert not (tmp_path / "two.html").exists()


def test_a_study_on_no_disk_needs_a_place(study: Study, tmp_path: Path) -> None:
    loose = Study(None, study.runs, study.results, study.failures, study.join)
    with pytest.raises(InputError, match="on no disk"):
        report(loose)
    assert report(loose, tmp_path / "page.html").path.exists()


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(InputError, match="is no study"):
        report(tmp_path / "empty.zarr")


def test_many_runs_are_cut_and_said(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_page, "_MOST_ROWS", 1)
    monkeypatch.setattr(study_page, "_MOST_POINTS", 3)
    monkeypatch.setattr(study_page, "_MOST_QUANTITIES", 2)
    notes = report(study, tmp_path / "page.html").notes
    assert f"runs: the first 1 of {study.runs.sizes['run']}; the study has them all" in notes
    assert "failures: the first 1 of 2; the study has them all" in notes
    assert "points of a quantity: 3 of 6, evenly taken" in notes
    assert any(note.startswith("quantities: the first 2 of ") for note in notes)


@pytest.fixture(scope="module")
def shown(made: Report) -> Iterator[Opened]:
    with browser() as running:
        yield opened(running, made.path)


def drawn(shown: Opened) -> list[tuple[float, float, str, float]]:
    """The points on the plot: setting, quantity, run, seed."""
    found = []
    for number in range(3):
        data = shown.model("linear", f"model.renderers[{number}].data_source.data")
        x, y, run, seed = (values(data[key]) for key in ("x", "y", "run", "seed"))
        found += [
            (float(a), float(b), c, float(d)) for a, b, c, d in zip(x, y, run, seed, strict=True)
        ]
    return found


def values(given: Any) -> list:
    return list(given.values()) if isinstance(given, dict) else list(given)


def choose(shown: Opened, label: str, option: str) -> None:
    shown.page.get_by_label(label, exact=True).select_option(option)


def expected(study: Study, column: str, setting: str) -> set[tuple[float, float, str, float]]:
    frame = study.table[study.table["probe"] == "circuits"].dropna(subset=[column])
    return {
        (round(row[setting], 9), round(float(np.float32(row[column])), 5), row["run"], row["seed"])
        for _, row in frame.iterrows()
    }


def test_a_quantity_is_drawn_against_a_setting(shown: Opened, study: Study) -> None:
    for number, setting in enumerate(("model.n_heads", "optimizer.learning_rate")):
        choose(shown, "Quantity", f"circuits: omega, place {number}")
        choose(shown, "Setting", setting)
        found = {(round(x, 9), round(y, 5), run, seed) for x, y, run, seed in drawn(shown)}
        assert found == expected(study, f"omega_{number}", setting) != set()
        logarithmic = number == 1
        assert shown.model("log", "model.visible") == logarithmic
        assert shown.model("linear", "model.visible") != logarithmic
        plot = "log" if logarithmic else "linear"
        low, high = (shown.model(plot, f"model.x_range.{end}") for end in ("start", "end"))
        assert low < min(x for x, *_ in found) <= max(x for x, *_ in found) < high
    assert shown.complaints == []


def test_the_first_choice_is_drawn_as_the_browser_draws_it(shown: Opened) -> None:
    shown.page.reload()
    shown.page.wait_for_function("window.Bokeh?.documents?.[0]?.is_idle")
    at_first = sorted(drawn(shown))
    options = shown.page.get_by_label("Setting", exact=True).locator("option")
    first, second, *_ = options.all_text_contents()
    choose(shown, "Setting", second)
    choose(shown, "Setting", first)
    assert sorted(drawn(shown)) == at_first != []
    assert shown.complaints == []


def test_the_page_is_no_wider_than_a_narrow_screen(shown: Opened) -> None:
    shown.page.set_viewport_size({"width": 400, "height": 900})
    # Plots follow a moment later.
    shown.page.wait_for_function("document.documentElement.scrollWidth <= 400", timeout=10_000)
