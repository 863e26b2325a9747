"""The page of a run: what is on it, that it is whole in itself, and what is reused."""

import base64
import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import mechicl
from mechicl import analyses, plots, results
from mechicl.analyses.summary import number_table, verdict_table
from mechicl.errors import DamagedRunError, InputError, MechiclError, NothingToAnalyseError
from mechicl.run import Run
from mechicl.studies.report import Report, figures, report
from tests.studies.report.pages import EVIL, Page

FORWARD = [
    "activation_patching",
    "approximate_loss",
    "length_generalization",
    "loss_landscape",
    "predictor_distance",
]


@pytest.fixture(scope="module")
def page(made: Report) -> Page:
    return Page(made.path)


def test_the_page_is_beside_the_run_and_small(small: Run, made: Report) -> None:
    assert made.path == Path(small.path) / "report.html"
    assert 1_600_000 < made.path.stat().st_size < 5_000_000
    assert [path.name for path in made.path.parent.iterdir() if path.name.startswith(".rep")] == []


def test_the_page_needs_nothing_from_elsewhere(page: Page) -> None:
    assert page.fetched() == []
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"}).attrs["content"]
    assert str(policy).startswith("default-src 'none'")
    assert [each.attrs for each in page.all("script") if "src" in each.attrs] == []
    assert page.all("link") == page.all("iframe") == []


def test_the_check_of_what_is_fetched_sees_it(page: Page, tmp_path: Path) -> None:
    for extra in ('<img src="https://a.b/c.png">', '<script src="x.js"></script>'):
        other = tmp_path / "page.html"
        other.write_text(page.source.replace("</main>", f"{extra}</main>"), encoding="utf-8")
        assert len(Page(other).fetched()) == 1


def test_the_page_is_semantic(page: Page) -> None:
    assert page.one("html").attrs["lang"] == "en"
    assert page.one("meta", name="viewport").attrs["content"] is not None
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    assert page.all("table")
    assert len(page.all("caption")) == len(page.all("thead")) == len(page.all("table"))
    assert len(page.all("th", scope="row")) >= 20
    ids = [each.attrs["id"] for each in page.elements if "id" in each.attrs]
    assert len(ids) == len(set(ids))
    links = [str(each.attrs["href"]) for each in page.all("a")]
    assert len(links) >= 5
    assert {link.removeprefix("#") for link in links} <= {*map(str, ids)}


def test_names_are_text_and_never_part_of_the_page(page: Page, small: Run) -> None:
    assert EVIL not in page.source
    assert page.one("p", **{"class": "where"}).text == str(small.path)
    assert page.one("p", **{"class": "lead"}).text == f"two heads {EVIL}"
    assert "<script>alert" not in page.source.replace(html.escape(EVIL), "")


def test_verdicts_and_key_figures_are_those_of_analyze(page: Page, made: Report) -> None:
    run = mechicl.open_run(made.path.parent)
    found = {name: run.analyze(name) for name in made.computed}
    for table in (verdict_table(found), number_table(found)):
        assert table is not None
        head, *rows = page.rows(table.title)
        assert tuple(head) == table.columns
        assert [row[-2:] for row in rows] == [row[-2:] for row in table.rows]
        assert all(row[0] for row in rows)
    assert "since" in page.section("verdicts") or ">no<" in page.section("verdicts")
    for name, result in found.items():
        if "statement" in result.attrs:
            assert f"<b>{name}</b></dt><dd>{html.escape(result.attrs['statement'])}" in page.source


def test_every_probe_has_a_figure_or_a_reason(page: Page, small: Run, made: Report) -> None:
    assert made.waiting == FORWARD
    assert {*made.computed} == {
        name
        for name in analyses.names()
        if small.objection(name) is None and not analyses.get(name).forward
    }
    images = {str(each.attrs["alt"]).partition(":")[0]: each for each in page.all("img")}
    assert [*images] == made.computed
    for name, image in images.items():
        assert html.unescape(analyses.get(name).summary) in str(image.attrs["alt"])
        data = base64.b64decode(str(image.attrs["src"]).partition(",")[2])
        assert data.startswith(b"\x89PNG")
        assert int(str(image.attrs["width"])) > 300
    reasons = dict(page.rows("and why")[1:])
    assert {*reasons} == {*analyses.names()} - {*images}
    for name, why in reasons.items():
        objection = small.objection(name)
        assert why == (
            "not computed, for it evaluates the model"
            if objection is None
            else f"does not apply: {objection}"
        )


def test_the_run_is_told(page: Page, small: Run) -> None:
    about = dict(page.rows("what it is")[1:])
    assert about["digest"] == small.trajectory.attrs["run_digest"]
    assert about["checkpoints"] == f"{len(small.steps)} of {len(small.steps)}, complete"
    assert "n_context: 5" in page.one("pre").text
    assert page.all("p", **{"class": "warning"})[0].text.startswith("The plots of this section")


def test_results_of_the_run_as_it_is_are_reused(
    small_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    (stored,) = small_copy.glob("analyses/sign_matching-*.zarr")
    changed = xr.open_zarr(stored).load()
    changed["sign_agreement"][:] = 0.125
    results.write_aside(stored, lambda path: results._to_zarr(changed, path))
    monkeypatch.setattr(Run, "analyze", refuse)
    done = report(small_copy, probes=["sign_matching", "circuits"], attention=False)
    assert done.computed == []
    rows = Page(done.path).rows("key figures at step 40")
    assert [row[2:] for row in rows if row[:2] == ["sign_matching", "sign_agreement"]] == [
        ["0.125", "0.125"]
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"run_digest": "of another run"},
        {"mechicl_version": "0.0.1"},
        {"parameters": json.dumps({"tolerance": 0.5})},
        {"against": "{}"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_results_of_another_run_version_or_setting_are_not(
    small_copy: Path, change: dict[str, str]
) -> None:
    assert mechicl.open_run(small_copy).stored("sign_matching") is not None
    (stored,) = small_copy.glob("analyses/sign_matching-*.zarr")
    other = xr.open_zarr(stored).load().assign_attrs(change)
    results.write_aside(stored, lambda path: results._to_zarr(other, path))
    assert mechicl.open_run(small_copy).stored("sign_matching") is None


def test_results_of_some_steps_or_seeds_are_not(small_copy: Path) -> None:
    run = mechicl.open_run(small_copy)
    shutil.rmtree(small_copy / "analyses")
    run.save(run.analyze("sign_matching", seeds=[0]), figure=False)
    run.save(run.analyze("sign_matching", steps=[0, 40]), figure=False)
    assert run.stored("sign_matching") is None
    run.save(run.analyze("sign_matching"), figure=False)
    stored = run.stored("sign_matching")
    assert stored is not None
    assert stored["step"].values.tolist() == run.steps.tolist()


def test_a_stored_result_that_cannot_be_opened_is_computed_anew(small_copy: Path) -> None:
    (stored,) = small_copy.glob("analyses/sign_matching-*.zarr")
    (stored / "zarr.json").write_text("{")
    done = report(small_copy, probes=["sign_matching"], attention=False)
    assert done.computed == ["sign_matching"]


def test_forward_probes_are_stored_ones_or_asked_for(small_copy: Path) -> None:
    run = mechicl.open_run(small_copy)
    run.save(run.analyze("activation_patching", n_prompts=8), figure=False)
    assert run.stored("activation_patching") is None, "8 prompts are not the default"
    named = ["circuits", "activation_patching"]
    done = report(small_copy, probes=named, attention=False)
    assert (done.computed, done.waiting) == (["activation_patching"], [])
    again = report(small_copy, probes=named, attention=False)
    assert (again.computed, again.waiting) == ([], [])
    assert len(Page(again.path).all("img")) == 2
    assert report(small_copy, attention=False).waiting == FORWARD[1:]


def test_what_is_refused_costs_nothing(small_copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.html"
    other.write_text("<h1>mine</h1>")
    with pytest.raises(InputError, match="no report of mechicl"):
        report(small_copy, other)
    assert other.read_text() == "<h1>mine</h1>"
    for out, why in (("s3://bucket/report.html", "URL"), (tmp_path, "is a directory")):
        with pytest.raises(InputError, match=why):
            report(small_copy, out)
    with pytest.raises(InputError, match=r"ends in \.html"):
        report(small_copy, tmp_path / "report.pdf")
    with pytest.raises(InputError, match="did you mean 'circuits'"):
        report(small_copy, probes=["circuit"])
    with pytest.raises(NothingToAnalyseError, match="routing"):
        report(small_copy, tmp_path / "none.html", probes=["routing"])
    assert not (tmp_path / "none.html").exists()


def test_a_report_is_replaced(small_copy: Path) -> None:
    done = report(small_copy, probes=["circuits"], attention=False)
    assert done.path == small_copy / "report.html"
    assert len(Page(done.path).all("img")) == 1


def test_a_read_only_run_needs_another_place(
    small_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(small_copy / "analyses")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != small_copy and access(path, mode))
    with pytest.raises(MechiclError, match=r"is read-only; --out FILE\.html"):
        report(small_copy, probes=["circuits"])
    out = tmp_path / "p.html"
    done = report(small_copy, out, probes=["circuits"], attention=False)
    assert (done.path, done.computed, done.saved) == (out, ["circuits"], False)
    assert not (small_copy / "analyses").exists()
    assert Page(out).all("img")


def test_a_run_at_a_url_is_read_from_there(small_copy: Path, tmp_path: Path) -> None:
    url = f"file://{small_copy}"
    with pytest.raises(InputError, match="give one with --out"):
        report(url)
    done = report(url, tmp_path / "p.html", probes=["circuits"], attention=False)
    assert (done.computed, done.saved) == (["circuits"], False)
    assert Page(done.path).one("p", **{"class": "where"}).text == url


def test_a_run_that_has_just_begun_has_a_page(small_copy: Path) -> None:
    group = zarr.open_group(small_copy / "trajectory.zarr")
    group["n_saved"][...] = 1
    done = report(small_copy, attention=False)
    page = Page(done.path)
    assert "the training loss is not drawn: no value above 0 is logged" in done.notes
    assert done.notes[0].startswith("attention is left out")
    assert [each.text for each in page.all("h3")][:2] == ["KQ", "OV"]
    said = page.all("p", **{"class": "warning"})[0].text
    assert said.startswith("Unfinished run (or still training): 1 of ")


def test_a_damaged_run_leaves_the_page_that_was_there(small_copy: Path) -> None:
    before = (small_copy / "report.html").read_bytes()
    for path in small_copy.glob("trajectory.zarr/W_Q/c/**/*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(DamagedRunError):
        report(small_copy)
    assert (small_copy / "report.html").read_bytes() == before


def test_an_unfinished_run_and_one_that_diverged_say_so(
    small_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "complete", property(lambda self: False))
    monkeypatch.setattr(Run, "diverged", lambda self: {3: 1200})
    done = report(small_copy, probes=["circuits"], attention=False)
    said = [each.text for each in Page(done.path).all("p", **{"class": "warning"})]
    assert said[0].startswith("Unfinished run")
    assert said[1] == "Seed 3 diverged at step 1,200; it is undefined after that."


def test_a_page_without_forward_passes_needs_no_torch(small_copy: Path) -> None:
    code = (
        "import sys; from mechicl.studies.report import report\n"
        f"report({str(small_copy)!r}, probes=['circuits', 'head_roles'], attention=False)\n"
        "print('imported:', *[m for m in ('torch', 'transformer_lens') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "imported:"), done.stderr


def test_figures_are_made_to_fit(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"circuits": plots.draw(small.analyze("circuits"))}
    whole, note = figures.embedded(found)
    assert note is None
    size = len(whole["circuits"].data)
    monkeypatch.setattr(figures, "BUDGET", size // 2)
    fitted, note = figures.embedded(found)
    assert len(fitted["circuits"].data) <= size // 2
    assert fitted["circuits"].width < whole["circuits"].width
    assert note is not None
    assert "in place of 110" in note
    assert np.isclose(
        fitted["circuits"].width / fitted["circuits"].height,
        whole["circuits"].width / whole["circuits"].height,
        rtol=0.02,
    )
