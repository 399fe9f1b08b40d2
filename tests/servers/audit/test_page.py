"""The page of an audit, opened in a real browser."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from otel_limits.cli import main
from otel_limits.core.limits import Breach, Limits
from tests.ledger.book import DAY, NINE, Call, Entry, write
from tests.processes import tied

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

    from tests.ledger.fixtures import LedgerFile

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER) and os.environ.get("CI") != "true",
    reason="Chromium and its driver are missing: apt-get install chromium chromium-driver.",
)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with an empty profile."""
    assert BROWSER is not None
    assert DRIVER is not None, "CI needs chromium and chromium-driver"
    directory = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = script(directory / "browser", BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={directory / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(script(directory / "driver", DRIVER))
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


def script(path: Path, program: str) -> str:
    """Write a script that runs a program with its own arguments, tied to what starts it."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(tied(program))} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def page(browser: Any, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> Any:
    """The report of a ledger with two agents, opened; afterwards the console has no error."""
    fill(ledger)
    open_page(browser, ledger.path.parent, capsys, "spend", "--by", "agent,model,day")
    yield browser
    assert browser.get_log("browser") == []


def fill(ledger: LedgerFile) -> None:
    """Record three days of two agents, some halted at 3 turns."""
    cap = Limits(max_turns=3)
    halted = {"reason": "max_turns", "action": "halted", "limits": cap}
    breach = Breach("max_turns", 3, 3, "max_turns", "turns")
    entries = [
        Entry(agent="research", calls=[Call(price="0.5", model="big")] * 3, at=NINE, breach=breach,
              **halted),  # type: ignore[arg-type]
        Entry(agent="research", calls=[Call(price="0.25", model="big")] * 2, at=NINE + DAY,
              limits=cap),
        Entry(agent="<b>writer</b>", calls=[Call(input=9000)], at=NINE + 2 * DAY, limits=cap),
    ]  # fmt: skip
    write(ledger.address, *entries)


def open_page(
    browser: Any, directory: Path, capsys: pytest.CaptureFixture[str], *question: str
) -> None:
    """Write the page of a question and open it."""
    assert main(["audit", *question, "--format", "html"]) == 0
    path = directory / "page.html"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    browser.get(path.as_uri())


def texts(page: Any, selector: str) -> list[str]:
    """The text of every element that matches a selector."""
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, selector)]


def total(page: Any, name: str) -> str:
    """The exact value of a total."""
    found: WebElement = page.find_element(By.CSS_SELECTOR, f'[data-total="{name}"]')
    return found.get_attribute("data-value") or ""


def test_the_totals_are_those_of_the_ledger(page: Any) -> None:
    """They are shown grouped and are exact behind that."""
    assert total(page, "Tokens") == str(5 * 120 + 9020)
    assert total(page, "Cost") == "2.000000000000"
    assert "9,620" in texts(page, "dl.totals dd")


def test_the_head_has_time_version_ledger_and_completeness(page: Any) -> None:
    """A report is kept for years: when, by which version, over which time, from which ledger."""
    head = page.find_element(By.TAG_NAME, "header").text
    made = rf"Made [-\d]+ [:\d]+ UTC by otel-limits {re.escape(version('otel-limits'))}, covers "
    assert re.search(made + r"[-\d]+ [:\d]+ to [-\d]+ [:\d]+ UTC", head), head
    assert "ledger.db" in head
    assert "Totals of the whole ledger match" in head


def test_the_table_has_every_group(page: Any) -> None:
    """One row per group, in its order, and names are text."""
    assert [row.split()[:3] for row in texts(page, "#table-spend tbody tr")] == [
        ["research", "big", "2025-10-09"],
        ["research", "big", "2025-10-10"],
        ["<b>writer</b>", "m", "2025-10-11"],
    ]


def test_a_column_sorts(page: Any) -> None:
    """The largest first, then the smallest; what is not known stays last."""
    heads = page.find_elements(By.CSS_SELECTOR, "#table-spend thead th")
    names = [head.text.lower() for head in heads]
    tokens = heads[names.index("tokens")].find_element(By.TAG_NAME, "button")
    place = names.index("tokens") + 1

    def column() -> list[str]:
        return texts(page, f"#table-spend tbody td:nth-child({place})")

    tokens.click()
    assert column() == ["9,020", "360", "240"]
    tokens.click()
    assert column() == ["240", "360", "9,020"]
    cost = next(head for head in heads if head.text.lower() == "cost")
    cost.find_element(By.TAG_NAME, "button").click()
    assert column() == ["360", "240", "9,020"]


def test_bars_say_their_numbers(page: Any) -> None:
    """Spend over time, by agent and model, stops by reason: each bar has its exact value."""
    hints = [
        element.get_attribute("textContent")
        for element in page.find_elements(By.CSS_SELECTOR, "figure rect title")
    ]
    for expected in (
        "2025-10-09 · research: $1.50",
        "2025-10-10 · research: $0.50",
        "big · spend: $2.00",
        "max_turns · halted: 1",
        "end_turn · finished: 2",
        "3 · halted: 1",
    ):
        assert expected in hints
    assert len(texts(page, "figure")) == 5


def test_the_configured_cap_is_drawn_in(page: Any) -> None:
    """A line is at the right edge of the bar for three turns."""
    assert texts(page, "#chart-turns text.marked") == ["max_turns 3"]
    mark = page.find_element(By.CSS_SELECTOR, "#chart-turns line.mark").rect["x"]
    bar = page.find_element(By.CSS_SELECTOR, "#chart-turns rect.halted").rect
    assert mark >= bar["x"] + bar["width"] - 1


def test_it_is_light_and_dark(page: Any) -> None:
    """One button changes all colours."""
    body = page.find_element(By.TAG_NAME, "body")
    button = page.find_element(By.ID, "theme")
    first = body.value_of_css_property("background-color")
    button.click()
    second = body.value_of_css_property("background-color")
    button.click()
    assert first != second
    assert body.value_of_css_property("background-color") == first


def test_it_fetches_nothing(page: Any) -> None:
    """No script, style, font or picture comes from anywhere else."""
    fetched = page.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert [name for name in fetched if not name.startswith("data:")] == []
    assert re.findall(r"https?://(?!www\.w3\.org/)[^\"'<]*", page.page_source) == []


@pytest.mark.parametrize(
    "question",
    [
        ("stops",),
        ("show", "00000001"),
        ("backtest", "--max-turns", "2"),
        ("suggest", "--min-invocations", "1"),
    ],
    ids=lambda question: str(question[0]),
)
def test_every_question_has_a_page(
    browser: Any,
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    question: tuple[str, ...],
) -> None:
    """Each of them opens without an error in the console."""
    fill(ledger)
    open_page(browser, ledger.path.parent, capsys, *question)
    assert browser.find_element(By.TAG_NAME, "h1").text
    assert browser.get_log("browser") == []


def test_an_empty_ledger_has_a_page(
    browser: Any, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing to draw is no error."""
    write(ledger.address, Entry(agent="x"))
    open_page(browser, ledger.path.parent, capsys, "spend", "--since", "2100-01-01")
    assert total(browser, "Model calls") == "0"
    assert "None." in texts(browser, "td.empty")
    assert browser.get_log("browser") == []


def test_the_page_is_readable_on_a_telephone(page: Any) -> None:
    """At 390 pixels nothing but a table or a drawing is scrolled sideways, and text is not tiny."""
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        smallest = page.execute_script(
            "return Math.min(...[...document.querySelectorAll('svg text')].map("
            "each => each.getBoundingClientRect().height))"
        )
        assert smallest >= 11
        assert page.execute_script("return document.querySelector('#complete').textContent")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize(
    "question",
    [
        ("show", f"00000001{24 * 'a'}"),
        ("loops",),
        ("spend", "--by", "tool"),
        ("spend", "--by", "agent", "--since", "2025-10-10", "--compare", "1d"),
    ],
    ids=lambda each: each[-1],
)
def test_every_answer_is_readable_on_a_telephone(
    browser: Any, ledger: LedgerFile, capsys: pytest.CaptureFixture[str], question: tuple[str, ...]
) -> None:
    """Sentences are wrapped, also where a name in them is long."""
    tools = ["search_the_archive_of_quarterly_filings=1"]
    entry = Entry(
        agent="research-assistant-for-quarterly-filings-of-the-emea-region-" * 2,
        calls=[Call(price="21789.63", tools=tools)] * 4,
        reason="loop_detected",
        action="halted",
        breach=Breach("max_identical_tool_calls", 4, 4, "loop_detected", "calls"),
    )
    write(ledger.address, entry, Entry(at=NINE + DAY))
    open_page(browser, ledger.path.parent, capsys, *question)
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        told = browser.execute_script("return document.body.innerText")
        assert ("was halted by max_identical_tool_calls" in told) == (question[0] == "show")
        assert ("No forecast: " in told) == ("tool" in question)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []
