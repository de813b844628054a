"""The report in a real browser: layout, interaction and requests, at two widths."""

import csv
import json

import numpy as np
import pytest
from browser import Browser, find_browser
from reported import write_run, write_suite
from scipy.stats import trim_mean

from torchrl_marl.apps.reports import write_report

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium (apt-get install chromium)"),
]
SIZES = pytest.mark.parametrize(
    ("width", "dark"), [(1440, False), (375, True)], ids=["desktop", "phone"]
)
BALANCE = '[data-task="0"]'


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    write_suite(folder, ["balance", "navigation", "wheel"], seeds=5, points=9)
    write_run(
        folder / "balance" / "maddpg",
        np.linspace(0, 20, 9),
        recipe="vmas_balance_mappo",
        frames=np.linspace(0, 480_000, 9).astype(int),
        finished=False,
        **{"learner.algorithm": "maddpg"},
    )
    return folder


@pytest.fixture(scope="module")
def report(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(suite, folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    browser = Browser(PROGRAM)
    yield browser
    browser.close()


def returns(suite, algorithm, row):
    """The returns of an evaluation in balance, seed by seed."""
    found = []
    for path in sorted((suite / "balance" / algorithm).glob("seed*/evaluation.csv")):
        lines = list(csv.DictReader(path.read_text().splitlines()))
        found.append(float(lines[row]["return_mean"]))
    return found


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)})?.innerText")


def tip(browser):
    """The tooltip of balance: the position, and the cells of each algorithm."""
    lines = [line.split("\t") for line in text(browser, f"{BALANCE} .tip").splitlines()]
    return lines[0][0], {cells[0]: cells[1:] for cells in lines[1:]}


def curves(browser):
    return browser.run(
        f"[...document.querySelectorAll('{BALANCE} path.line')].map(x => x.dataset.name)"
    )


def ticks(browser):
    return browser.run(
        f"[...document.querySelectorAll('{BALANCE} .x-tick')].map(x => x.textContent)"
    )


def press_button(browser, name):
    browser.run(
        "[...document.querySelectorAll('.controls button')]"
        f".find(x => x.textContent === {json.dumps(name)}).setAttribute('data-wanted', 1)"
    )
    browser.click("[data-wanted]")
    browser.run("document.querySelector('[data-wanted]').removeAttribute('data-wanted')")


@SIZES
def test_page_fits_the_width_without_errors_or_requests(browser, report, width, dark):
    browser.open(report, width, 900, dark=dark, phone=width < 500)
    browser.run("document.querySelectorAll('details').forEach(x => { x.open = true })")
    browser.settle()
    assert browser.run("document.documentElement.scrollWidth") == width
    # Only elements that scroll may exceed the width.
    beyond = browser.run(
        "[...document.querySelectorAll('main *')]"
        ".filter(x => !x.closest('.scroll, .tip, .algorithms') &&"
        "x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    assert browser.complaints == []
    assert browser.requests == [report.resolve().as_uri()]
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark


@SIZES
def test_hovering_shows_values_of_the_curves(browser, suite, report, width, dark):
    browser.open(report, width, 900, phone=width < 500)
    left, top, wide, high = browser.box(f"{BALANCE} svg")
    browser.move(left + wide - 13, top + high / 2)
    place, values = tip(browser)
    assert place == "480,000 frames"
    assert list(values) == ["MAPPO", "IPPO", "MADDPG"]  # in descending order
    for name in ("mappo", "ippo"):
        value, interval, runs = values[name.upper()]
        digits = len(value.partition(".")[2])
        exact = trim_mean(returns(suite, name, -1), 0.25)
        assert value == f"{exact:.{digits}f}" and digits <= 2 and runs == "n=5"
        low, high = json.loads(interval)
        assert low < exact < high
    assert values["MADDPG"] == ["20", "no interval", "n=1"]
    browser.move(1, 1)
    assert browser.run(f"document.querySelector('{BALANCE} .tip').hidden")


def test_arrow_keys_show_values_of_the_curves(browser, suite, report):
    browser.open(report)
    browser.run(f"document.querySelector('{BALANCE} svg').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    place, values = tip(browser)
    assert place == "60,000 frames"
    exact = trim_mean(returns(suite, "mappo", 1), 0.25)
    assert float(values["MAPPO"][0]) == pytest.approx(exact, abs=0.5)
    browser.press("Escape")
    assert browser.run(f"document.querySelector('{BALANCE} .tip').hidden")


def test_algorithms_and_runs_can_be_hidden(browser, suite, report):
    browser.open(report)
    assert sorted(curves(browser)) == ["IPPO", "MADDPG", "MAPPO"]
    press_button(browser, "IPPO")
    assert sorted(curves(browser)) == ["MADDPG", "MAPPO"]
    profiles = "document.querySelectorAll('[data-chart=profiles] path.line').length"
    assert browser.run(profiles) == 1  # over all tasks, too
    browser.click(f"{BALANCE} details.runs summary")
    browser.click(f"{BALANCE} input[data-team='2'][data-run='1']")
    browser.run(f"document.querySelector('{BALANCE} svg').focus()")
    browser.press("ArrowLeft")
    value, interval, runs = tip(browser)[1]["MAPPO"]
    left = np.delete(returns(suite, "mappo", -1), 1)
    digits = len(value.partition(".")[2])
    assert runs == "n=4" and value == f"{trim_mean(left, 0.25):.{digits}f}"
    low, high = json.loads(interval)
    assert min(left) - 0.5 <= low < high <= max(left) + 0.5
    for run in (0, 2, 3, 4):
        browser.click(f"{BALANCE} input[data-team='2'][data-run='{run}']")
    assert curves(browser) == ["MADDPG"]
    press_button(browser, "MADDPG")
    assert curves(browser) == [] and "switched on" in text(browser, f"{BALANCE} .chart")


def test_axis_controls(browser, report):
    browser.open(report)
    assert ticks(browser) == ["0", "100k", "200k", "300k", "400k"]
    press_button(browser, "log")
    assert ticks(browser) == ["100k", "200k"]  # the evaluation at frame 0 is not shown
    places = browser.run(
        f"document.querySelector('{BALANCE} path.line').getAttribute('d')"
    ).strip("M").split("L")  # fmt: skip
    x = [float(place.split()[0]) for place in places]
    # 60,000, 120,000 and 240,000 frames are equally spaced.
    assert len(x) == 8 and x[1] - x[0] == pytest.approx(x[3] - x[1], abs=0.3)
    press_button(browser, "linear")
    press_button(browser, "agent frames")
    assert ticks(browser) == ["0", "500k", "1M"]
    press_button(browser, "seconds of training")
    assert ticks(browser)[-1] != "1M"
    press_button(browser, "each")
    assert browser.run(f"document.querySelectorAll('{BALANCE} path.thin').length") == 11
    assert browser.complaints == []


def test_tables_can_be_sorted(browser, report):
    browser.open(report)
    column = (
        "[...[...document.querySelectorAll('.table')].find(x => x.innerText.startsWith('Return in "
        "each task')).querySelectorAll('tbody tr')].map(x => x.cells[0].innerText)"
    )
    assert browser.run(column) == ["balance", "navigation", "wheel"]
    head = "[aria-label='Return in each task (IQM)'] th:nth-child({}) button"
    browser.click(head.format(5))  # the random policy's return
    assert browser.run(column) == ["navigation", "wheel", "balance"]
    browser.click(head.format(5))
    assert browser.run(column) == ["balance", "wheel", "navigation"]
    for _ in range(2):  # only balance has MADDPG; missing values are last in both directions
        browser.click(head.format(4))
        assert browser.run(column)[0] == "balance"
    browser.click(head.format(1))
    assert browser.run(column) == ["balance", "navigation", "wheel"]


def test_theme_button_switches_to_light(browser, report):
    browser.open(report, dark=True)
    assert text(browser, "#theme") == "Light"
    browser.click("#theme")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"


if __name__ == "__main__":
    pytest.main([__file__])
