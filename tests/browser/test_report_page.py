"""The evaluation page in a real browser: it is clicked through as a person would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muralist.evaluate.report import write_report
from tests.support.evaluations import HOSTILE, write_evaluation

pytestmark = pytest.mark.slow


class Visit:
    """An open page, and everything it asked for or complained about."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_context(**context).new_page()
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def seen(self, selector: str) -> Any:
        return self.page.locator(selector).locator("visible=true")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def close(self) -> None:
        """End the visit: nothing went wrong, and nothing but files was asked for."""
        away = [url for url in self.requests if not url.startswith(("file:", "data:"))]
        self.page.context.close()
        assert self.troubles == [] and away == []


@pytest.fixture
def visit(browser: Any) -> Callable[..., Visit]:
    return lambda path, **context: Visit(browser, path, **context)


def test_one_run(visit: Callable[..., Visit], tmp_path: Path) -> None:
    looking = visit(write_report([write_evaluation(tmp_path / "run")], tmp_path / "run" / "report"))
    page = looking.page
    assert page.title() == "run: evaluation", "the script in a prompt did not run"
    assert looking.seen("#images figure").count() == 12 and looking.seen("#speed .bars .point").count() == 2
    assert HOSTILE in looking.text("#images figure:nth-child(2)")

    page.get_by_role("searchbox").fill("CAR red")
    assert looking.seen("#images figure").count() == 5 and looking.text("#found") == "5 of 12 images"

    page.click("#images figure:nth-child(4) button")
    assert looking.text("#viewer .prompt") == "A red car number 3"
    assert looking.text("#viewer .about") == "0003_seed45.png · CLIP score 25.30 · 1 of 5"
    page.keyboard.press("ArrowRight")
    assert looking.text("#viewer .prompt") == "A red car number 5", "only images that match the filter"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert looking.text("#viewer .about").endswith("5 of 5")
    page.click("#viewer .next")
    assert looking.text("#viewer .prompt") == "A red car number 3"
    page.wait_for_function("document.querySelector('#viewer img').naturalWidth === 32")
    assert page.locator("#viewer a").get_attribute("href") == "../images/0003_seed45.png"
    page.keyboard.press("Escape")
    assert looking.seen("#viewer").count() == 0
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Enlarge 0003_seed45.png"

    page.get_by_role("searchbox").fill("")
    assert looking.seen("#images figure").count() == 12 and looking.text("#found") == ""
    page.focus("#images figure:nth-child(2) button")
    page.keyboard.press("Enter")
    assert looking.text("#viewer .prompt") == HOSTILE
    page.click("#viewer .close")
    page.click("nav a[href='#settings']")
    assert page.evaluate("document.querySelector('#settings').getBoundingClientRect().top") < 700
    looking.close()


def test_several_runs_are_compared_in_the_dark_and_on_a_phone(visit: Callable[..., Visit], tmp_path: Path) -> None:
    runs = [write_evaluation(tmp_path / name, 12, shift) for name, shift in (("old", 0.0), ("<i>new", -3.0))]
    path = write_report(runs, tmp_path / "report")
    looking = visit(path, viewport={"width": 375, "height": 700}, color_scheme="dark")
    page = looking.page
    assert page.evaluate("document.documentElement.scrollWidth") == 375, "nothing sticks out"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert "best" in looking.text(".scores tr:has-text('FID') td:last-child")
    assert looking.seen(".small-charts .bars .point").count() == 3 * 2
    assert "<i>new" in page.locator(".small-charts .xaxislayer-above").first.text_content()
    dark = page.evaluate("document.querySelector('.xtick text').style.fill")
    page.emulate_media(color_scheme="light")
    page.wait_for_function("before => document.querySelector('.xtick text').style.fill !== before", arg=dark)

    page.get_by_role("searchbox").fill("house 0004_")
    assert looking.seen(".row").count() == 1
    looking.seen(".row figure button").nth(0).click()
    assert looking.text("#viewer .about") == "old · 0004_seed46.png · CLIP score 25.40 · 1 of 2"
    page.keyboard.press("ArrowRight")
    assert looking.text("#viewer .about") == "<i>new · 0004_seed46.png · CLIP score 22.40 · 2 of 2"
    page.keyboard.press("Escape")
    assert looking.seen(".grid figure").count() == 0
    page.click("#images details:last-child summary")
    assert looking.seen(".grid figure").count() == 1
    looking.close()
