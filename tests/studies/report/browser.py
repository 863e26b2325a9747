"""A page in a headless Chromium, with what it complains of and what it asks a network for."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Opened(NamedTuple):
    page: Any
    complaints: list[str]
    requests: list[str]

    def model(self, name: str, expression: str) -> Any:
        """The value of an expression over the bokeh model `model` of this name."""
        return self.page.evaluate(
            f"name => {{ const model = Bokeh.documents[0].get_model_by_name(name);"
            f" return {expression} }}",
            name,
        )


def chromium() -> str:
    """The browser's executable; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            f"no browser here; lifted where a Chromium is on PATH ({', '.join(NAMES)}), as `apt "
            "install chromium` puts it there"
        )
    return found


@contextmanager
def browser() -> Iterator[Any]:
    executable = chromium()
    from playwright.sync_api import sync_playwright

    # Chromium has no sandbox for root, as whom tests run in containers.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=flags)
        try:
            yield running
        finally:
            running.close()


def opened(running: Any, path: Path, *, width: int = 1200) -> Opened:
    """Open a page and wait until its plots are drawn."""
    page = running.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    requests: list[str] = []
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(path.as_uri())
    page.wait_for_function("window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    return Opened(page, complaints, requests)
