"""The page of a run in a real browser, from a file."""

import pytest

from support.browser import Browser, find_browser
from support.recorded import make_run, solver, store, wanderer, with_text
from wayfinder.record.page import write_page

EXECUTABLE = find_browser()
pytestmark = pytest.mark.skipif(
    EXECUTABLE is None, reason="no Chromium on the PATH and no $CHROME: the page was not opened"
)

HOSTILE = "</script><img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    """The browser with the page of a made-up run."""
    browser.complaints.clear()
    browser.requests.clear()
    page = write_page(make_run(tmp_path / "run"))
    browser.open(page.as_uri())
    yield browser
    assert browser.complaints == []
    assert [r for r in browser.requests if not r.startswith("data:")] == [page.as_uri()]


def shown(browser: Browser, selector: str) -> str:
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def count(browser: Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


def test_opens_at_the_first_failure_of_the_last_evaluation(opened):
    assert shown(opened, "#title") == "maze_easy"
    assert shown(opened, "#score") == "step 10: 5/6 solved (83.3%)"
    assert shown(opened, "#episode b") == "seed 5"
    assert shown(opened, ".badge") == "stopped"
    assert count(opened, ".maze") == 6
    assert count(opened, "#curves svg path") >= 3
    assert opened.evaluate("document.getElementById('frame').naturalWidth") == 225
    assert opened.evaluate("document.getElementById('notes').hidden")


def test_keys_go_through_turns_episodes_and_evaluations(opened):
    assert "turn 1 of 6" in shown(opened, "#reply")
    frame = opened.evaluate("document.getElementById('frame').src")
    for _ in range(3):
        opened.press("ArrowRight")
    assert "turn 4 of 6" in shown(opened, "#reply")
    assert "no action" in shown(opened, "#reply")
    assert "cut at the token limit" in shown(opened, "#reply")
    assert "I see a wall" in shown(opened, "#reply pre")
    assert count(opened, ".token") == 3
    assert shown(opened, ".token:nth-child(3) i") == "-0.300"
    assert opened.evaluate("document.getElementById('frame').src") != frame
    opened.press("ArrowLeft")
    assert "turn 3 of 6" in shown(opened, "#reply")
    opened.press("End")
    assert "after 6 turns" in shown(opened, "#reply")
    opened.press("ArrowRight")
    assert "after 6 turns" in shown(opened, "#reply")
    opened.press("Home")
    assert opened.evaluate("document.getElementById('frame').src") == frame
    opened.press("ArrowDown")
    assert shown(opened, "#episode b") == "seed 0"
    assert shown(opened, ".badge") == "solved"
    opened.press("ArrowUp")
    opened.press("ArrowUp")
    assert shown(opened, "#episode b") == "seed 5"
    opened.press("[")
    assert shown(opened, "#score") == "step 0: 1/6 solved (16.7%)"
    assert shown(opened, "#episode b") == "seed 5"
    assert count(opened, "#history .dot") == 2


def test_space_plays_to_the_end_and_pauses(opened):
    opened.press(" ")
    assert "pause" in shown(opened, "#play")
    opened.wait_for("document.getElementById('reply').innerText.includes('turn 2 of 6')")
    opened.press(" ")
    assert "play" in shown(opened, "#play")
    opened.press("End")
    opened.press("ArrowLeft")
    opened.press(" ")
    opened.wait_for("document.getElementById('reply').innerText.includes('after 6 turns')")
    assert "play" in shown(opened, "#play")


def test_mouse_chooses_mazes_outcomes_kinds_and_evaluations(opened):
    opened.click(".maze:nth-child(3)")
    assert shown(opened, "#episode b") == "seed 1"
    opened.click("#next")
    assert "turn 2 of" in shown(opened, "#reply")
    opened.press(" ")  # plays: the clicked button does not keep the key
    assert "pause" in shown(opened, "#play")
    opened.click("#order button:nth-child(2)")
    assert opened.evaluate("document.querySelector('.maze').title").startswith("seed 0")
    opened.click("#legend button:nth-child(2)")  # stopped
    assert count(opened, ".maze.faded") == 5
    assert shown(opened, "#episode b") == "seed 5"
    opened.evaluate(
        "(() => { const s = document.getElementById('slider'); s.value = 0;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert shown(opened, "#score").startswith("step 0: 1/6")
    assert count(opened, ".maze.faded") == 1
    opened.click("#kinds button:nth-child(3)")
    assert shown(opened, "#score") == "step 10: 2/4 solved (50.0%)"
    assert count(opened, ".maze") == 2
    assert shown(opened, ".maze span") == "1/2"
    assert shown(opened, ".badge") == "solved"
    assert count(opened, "#history .dot") == 2
    opened.click("#curves .wide svg")
    assert shown(opened, "#score").startswith("step ")
    assert opened.evaluate("document.querySelector('#kinds [aria-pressed=true]').innerText") == (
        "eval"
    )


def test_what_a_model_writes_is_shown_and_not_run(browser, tmp_path):
    browser.complaints.clear()
    frames = {}
    episodes = [with_text(wanderer(1, frames), HOSTILE), with_text(solver(2, frames), HOSTILE)]
    store(tmp_path, "eval", 0, episodes, frames)
    browser.open(write_page(tmp_path).as_uri())
    assert shown(browser, "#reply pre") == HOSTILE
    for key in ("ArrowRight", "End", "ArrowDown"):
        browser.press(key)
    assert HOSTILE in shown(browser, "#episode .muted")
    assert browser.evaluate("window.hacked") is None
    assert count(browser, "script") == 2
    assert count(browser, "img[src=x]") == 0
    assert browser.complaints == []


def test_a_run_without_anything_says_so(browser, tmp_path):
    browser.complaints.clear()
    browser.open(write_page(tmp_path).as_uri())
    assert count(browser, "#notes li") == 4
    assert "no data" in shown(browser, "#curves")
    assert browser.evaluate("document.getElementById('evaluations').hidden")
    assert browser.complaints == []
