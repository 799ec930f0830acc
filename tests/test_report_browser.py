"""The page of ``tilestream report`` in a real browser: its counters, its keys, both colour schemes, a quiet console.

Skipped where there is no Chromium (Debian: packages chromium and chromium-driver), or no selenium, which the extra
`test` brings.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilestream.bench import viewer
from tilestream.cli import main
from tilestream.cli.page import page

pytest.importorskip("selenium")
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
DRIVER = shutil.which("chromedriver") or ""
# The last ones keep it from asking for anything at its start.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,900", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-quic",
)  # fmt: skip
SCHEMES = ("light", "dark")
# Of nine; that each walk ends at the model is asserted where it is made.
SHAPES = (("8", "16"), ("16", "8"), ("32", "32"))
LINE = {
    "suite": "traffic", "part": "training", "mode": "both", "provider": "eager", "needs_grad": False,
    "device": "a machine", "device_type": "cpu", "num_threads": 1, "torch": "2", "platform": "p", "commit": "c",
    "date": "2026-01-01", "reason": None, "is_wrong": False, "read_bytes": 1, "written_bytes": 1, "moved_bytes": 2,
    "bytes_model": 2, "bytes_least": 1, "config": {"name": "c"},
}  # fmt: skip

pytestmark = [
    pytest.mark.no_poison,
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="there is no chromium with its chromedriver here"),
    # Of selenium's and trio's own sockets.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Chromium with the page open from a file."""
    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        (folder / "page.html").write_text(page([LINE], []), encoding="utf-8")
        driver.get((folder / "page.html").as_uri())
        yield driver
        # Whatever the tests did.
        assert driver.get_log("browser") == []
    finally:
        driver.quit()


@pytest.fixture(autouse=True)
def _from_the_start(browser: webdriver.Chrome) -> None:
    browser.refresh()


def shown(browser: webdriver.Chrome) -> dict[str, list[int]]:
    """Bytes read, written and in all of both algorithms."""
    script = (
        "return ['ours', 'standard'].map(name => ['read', 'written', 'total'].map(side => {"
        " const shown = document.getElementById(`${name}-${side}`);"
        " return [Number(shown.dataset.bytes), shown.textContent]; }))"
    )
    found = {}
    for name, counters in zip(("ours", "standard"), browser.execute_script(script), strict=True):
        found[name] = [number for number, _ in counters]
        # What is read is what is meant.
        assert [int(re.sub(r"\D", "", text)) for _, text in counters] == found[name]
    return found


def press(browser: webdriver.Chrome, *keys: str) -> None:
    element = browser.find_element(By.ID, "viewer")
    for key in keys:
        element.send_keys(key)


def choose(browser: webdriver.Chrome, **choices: str) -> None:
    for name, value in choices.items():
        Select(browser.find_element(By.ID, name.replace("_", "-"))).select_by_value(value)


def status(browser: webdriver.Chrome) -> str:
    return str(browser.find_element(By.ID, "status").text)


@pytest.mark.parametrize("direction", viewer.DIRECTIONS)
@pytest.mark.parametrize("mask", viewer.MASKS)
def test_the_last_step_is_what_the_command_says(
    mask: str, direction: str, browser: webdriver.Chrome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(browser, direction=direction, mask=mask)
    for block_m, block_n in SHAPES:
        choose(browser, block_m=block_m, block_n=block_n)
        press(browser, Keys.END)
        words = browser.find_element(By.ID, "command").text.split()
        blocks = browser.find_element(By.ID, "blocks").text
        assert ("blocks.json" in words) == (mask == "sparse") == bool(blocks)
        if blocks:
            (tmp_path / "blocks.json").write_text(blocks.removeprefix("blocks.json: "))
            words[words.index("blocks.json")] = str(tmp_path / "blocks.json")
        assert words.pop(0) == "tilestream"
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        said = {one["algorithm"]: one for one in json.loads(capsys.readouterr().out)["algorithms"]}
        ours = said["tilestream, block-sparse" if blocks else "tilestream"]
        assert ours["tiles"] == [[int(block_m), int(block_n)]]
        wanted = {
            name: [one["read_bytes"], one["written_bytes"], one["total_bytes"]]
            for name, one in (("ours", ours), ("standard", said["standard"]))
        }
        assert shown(browser) == wanted


def test_counters_climb_step_by_step_and_back(browser: webdriver.Chrome) -> None:
    assert shown(browser) == {"ours": [0, 0, 0], "standard": [0, 0, 0]}
    assert status(browser) == "Step 0 of 14: nothing is loaded yet."
    seen = [shown(browser)]
    for _ in range(14):
        press(browser, Keys.ARROW_RIGHT)
        seen.append(shown(browser))
    assert status(browser).startswith("Step 14 of 14, pass forward, queries 48 to 63: stored.")
    for name in ("ours", "standard"):
        totals = [counters[name][2] for counters in seen]
        assert totals == sorted(totals)
        assert totals[-1] > totals[0]
    press(browser, Keys.ARROW_RIGHT)
    assert shown(browser) == seen[14]
    press(browser, Keys.ARROW_LEFT)
    assert shown(browser) == seen[13]
    press(browser, Keys.HOME)
    assert shown(browser) == seen[0]


def test_a_step_is_told_in_words(browser: webdriver.Chrome) -> None:
    press(browser, *[Keys.ARROW_RIGHT] * 4)
    walk = viewer.viewer_data()["walks"]["forward/causal/16/16"]
    row_max, row_sum = walk["steps"][3][12:]
    assert status(browser).startswith(
        "Step 4 of 14, pass forward, queries 16 to 31, keys 16 to 31: PARTIAL. On chip: q, k, v, scores, acc, row_max,"
        f" row_sum; 5,248 B. Row 31: row_max {row_max}, row_sum {row_sum}. Moved by tilestream"
    )
    live = browser.find_element(By.ID, "status")
    assert (live.get_attribute("role"), live.get_attribute("aria-live")) == ("status", "polite")
    rows = browser.find_elements(By.CSS_SELECTOR, "#fast tr")
    assert rows[0].text == "q 1 x 16 x 16 1,024 B"
    # Where the keys are typed, they step; in a list they choose.
    choice = browser.find_element(By.ID, "mask")
    choice.send_keys(Keys.END)
    assert status(browser).startswith("Step 0 of ")
    assert browser.find_elements(By.CSS_SELECTOR, "#grid .NOT_KEPT")


def test_every_control_has_a_name_and_takes_the_keyboard(browser: webdriver.Chrome) -> None:
    for element in browser.find_elements(By.CSS_SELECTOR, "button, select, input, #viewer, #grid"):
        assert element.accessible_name.strip(), element.get_attribute("id")
    browser.find_element(By.ID, "viewer").click()
    focused = []
    for _ in range(8):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused.append(browser.switch_to.active_element.get_attribute("id"))
    # At the first step there is no way back.
    assert focused == ["direction", "mask", "block-m", "block-n", "play", "next", "last", "slider"]
    slider = browser.switch_to.active_element
    slider.send_keys(Keys.ARROW_RIGHT)
    assert slider.get_attribute("aria-valuetext") == "Step 1 of 14"


def test_it_plays_to_the_end_and_stops(browser: webdriver.Chrome) -> None:
    press(browser, Keys.END, Keys.ARROW_LEFT, Keys.ARROW_LEFT, "p")
    assert browser.find_element(By.ID, "play").text == "Pause"
    WebDriverWait(browser, 10).until(lambda _: browser.find_element(By.ID, "play").text == "Play")
    assert status(browser).startswith("Step 14 of 14")


def luminance(colour: str) -> float:
    """Relative, as the Web Content Accessibility Guidelines define it."""
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def style(browser: webdriver.Chrome, selector: str, name: str) -> Any:
    element = browser.find_element(By.CSS_SELECTOR, selector)
    return element.value_of_css_property(name)


def test_both_colour_schemes_can_be_read(browser: webdriver.Chrome) -> None:
    grounds = []
    for scheme in SCHEMES:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        ground, raised = style(browser, "body", "background-color"), style(browser, "#viewer", "background-color")
        grounds.append(luminance(ground))
        assert contrast(style(browser, "body", "color"), ground) > 7
        assert contrast(style(browser, ".soft", "color"), ground) > 4.5
        assert contrast(style(browser, "#status", "color"), raised) > 4.5
        letters = style(browser, "#grid text:not(.axis)", "fill")
        press(browser, Keys.END)
        for kind in ("PARTIAL", "FULL"):
            assert contrast(letters, style(browser, f"#grid .{kind}", "fill")) > 4.5
        for bar in ("#ours-bar", "#standard-bar"):
            assert contrast(style(browser, bar, "background-color"), ground) > 3
    assert grounds[0] > 0.9
    assert grounds[1] < 0.05


def test_a_narrow_page_does_not_scroll_sideways(browser: webdriver.Chrome) -> None:
    size = browser.get_window_size()
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.set_window_size(size["width"], size["height"])


def test_nothing_is_fetched(browser: webdriver.Chrome) -> None:
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []
