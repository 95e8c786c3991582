"""The page in a real browser: Debian's chromium through its own driver. Pictures of it are kept in build/page."""

from __future__ import annotations

import base64
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynaflow.core.plan import Item, Lane, MicroBatch, Plan, Task
from dynaflow.observe.document import Counter, Document, TimedTask
from dynaflow.observe.page import page
from dynaflow.observe.timelines import of_plan, of_spans

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install 'dynaflow[browser]'")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium or no chromedriver: apt-get install chromium chromium-driver"
)
PICTURES = Path(__file__).parents[2] / "build" / "page"
LAYERS = 4


def schedule(parts: int) -> Plan:
    """A model of some layers, on one lane, or with its collectives on another."""
    tasks: list[Task] = []
    last: dict[int, int] = {}
    for layer in range(LAYERS):
        for op in ("self_attn", "all_reduce", "mlp"):
            for part in range(parts):
                lane = "link" if op == "all_reduce" and parts > 1 else "compute"
                after = (last[part],) if part in last and tasks[last[part]].lane != lane else ()
                last[part] = len(tasks)
                item = Item(op=f"model.layers.{layer}.{op}", micro_batches=(part,))
                tasks.append(Task(items=(item,), lane=lane, after=after))
    lanes = (Lane(name="compute"), Lane(name="link", sms=16, priority=-1))[: 2 if parts > 1 else 1]
    rows = 8 // parts
    batches = tuple(MicroBatch(index=i, start=i * rows, stop=(i + 1) * rows) for i in range(parts))
    return Plan(graph="g", micro_batches=batches, lanes=lanes, tasks=tuple(tasks))


def run(parts: int, slower: float = 1.0) -> Document:
    """Such a schedule with times: what each operator takes, and when its lane and what it waits for let it start."""
    plan = schedule(parts)
    takes = {"self_attn": 0.9e-3, "all_reduce": 0.6e-3, "mlp": 1.5e-3}
    free: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for task in plan.tasks:
        start = max([free.get(task.lane, 0.0), *(spans[a][1] + 5e-6 for a in task.after)])
        end = start + takes[task.items[0].op.rsplit(".", 1)[1]] / parts * slower
        spans.append((start, end))
        free[task.lane] = end
    found = of_spans(plan, spans, device="made up", title="in sequence" if parts == 1 else f"{parts} parts")
    extra = {"tags": ("network",), "uses": {"link": 0.84, "sms": 0.2}, "reads": ("hidden: bfloat16 [4, 512, 8192]",),
             "writes": ("sum: bfloat16 [4, 512, 8192]",), "bytes": 33554432}  # fmt: skip
    tasks = tuple(replace(t, **extra) if "all_reduce" in t.op else t for t in found.tasks)
    steps = 40
    memory = tuple((found.end * i / steps, 2e9 + 1e9 * (i * 7 % 11) / 11) for i in range(steps))
    return replace(found, tasks=tasks, counters=(Counter(name="memory", points=memory, unit="bytes"),))


def three() -> list[Document]:
    """Planned, simulated and measured, and a sequence to compare with."""
    sequence, parts = (replace(run(n), source="simulated") for n in (1, 2))
    return [sequence, parts, of_plan(schedule(2), title="2 parts"), run(2, slower=1.08)]


def many(count: int) -> Document:
    """On four lanes, each waiting for one of another."""
    length = 1e-5
    tasks = tuple(
        TimedTask(name=f"layers.{i // 8}.op{i % 8}", lane=f"lane{i % 4}", start=(i // 4) * length,
                  end=(i // 4 + 0.5 + 0.4 * (i % 7) / 7) * length, after=(i - 5,) if i % 9 == 0 and i > 5 else ())
        for i in range(count)
    )  # fmt: skip
    return Document(title=f"{count} tasks", source="measured", tasks=tasks,
                    lanes=tuple(Lane(name=f"lane{n}") for n in range(4)))  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument("--window-size=1440,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield found
    found.quit()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end nothing may stand in the console."""

    def opened(*documents: Document, dark: bool = False, width: int = 1440) -> Any:
        browser.get_log("browser")
        browser.set_window_size(width, 1000)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        file = tmp_path / "page.html"
        file.write_text(page(documents), encoding="utf-8")
        browser.get(file.as_uri())
        settle(browser)
        return browser

    yield opened
    assert browser.get_log("browser") == []


def settle(browser: Any) -> None:
    """Until what was asked for has been drawn."""
    script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
    browser.execute_async_script(script)


def picture(browser: Any, name: str, *, whole: bool = False) -> None:
    settle(browser)
    PICTURES.mkdir(parents=True, exist_ok=True)
    if not whole:
        browser.save_screenshot(str(PICTURES / f"{name}.png"))
        return
    found = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    (PICTURES / f"{name}.png").write_bytes(base64.b64decode(found["data"]))


def ask(browser: Any, expression: str) -> Any:
    return browser.execute_script(f"return {expression}")


def keys(browser: Any, *pressed: str) -> None:
    for key in pressed:
        ActionChains(browser).send_keys(key).perform()
    settle(browser)


def click(browser: Any, timeline: int, task: int) -> None:
    x, y = ask(browser, f"page.place({timeline}, {task})")
    chain = ActionChains(browser)
    chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))
    chain.click().perform()
    settle(browser)


def details(browser: Any) -> str:
    return browser.find_element(By.ID, "details").text


def test_it_opens(show: Callable[..., Any]) -> None:
    found = show(*three())
    assert len(found.find_elements(By.CSS_SELECTOR, "section.timeline canvas")) == 4
    assert ask(found, "page.drawn()") == sum(len(d.tasks) for d in three())
    headings = found.find_element(By.ID, "timelines").text
    assert "SIMULATED" in headings and "PLANNED" in headings and "MEASURED" in headings
    assert "stretched to the others" in headings, "steps have no length of their own"
    summaries = found.find_element(By.ID, "summaries").text
    assert "Critical path" in summaries and "waiting for model.layers.*" in summaries and "after its last" in summaries
    picture(found, "four", whole=True)


def test_one_scale(show: Callable[..., Any]) -> None:
    """The same moment is at the same place in every timeline."""
    found = show(*three())
    ends = ask(found, "page.timelines.map(t => t.length)")
    assert ends[1] < ends[0] and ends[3] == pytest.approx(ends[1] * 1.08, rel=0.01)
    assert ends[2] == pytest.approx(ends[0]), "the plan is stretched to the longest"
    middles = ask(found, "page.timelines.map((t, n) => [(t.start(0) + t.end(0)) / 2, page.place(n, 0)[0]])")
    slopes = [(x - middles[0][1]) / (time - middles[0][0]) for time, x in middles[1:]]
    assert slopes == pytest.approx([slopes[0]] * 3, rel=1e-6)


def test_the_wheel_zooms_where_the_pointer_is(show: Callable[..., Any]) -> None:
    found = show(*three())
    x, y = ask(found, "page.place(1, 9)")
    before = ask(found, "page.range()")
    ActionChains(found).scroll_from_origin(ScrollOrigin.from_viewport(round(x), round(y)), 0, -300).perform()
    settle(found)
    after = ask(found, "page.range()")
    assert after[1] - after[0] < 0.6 * (before[1] - before[0])
    assert ask(found, "page.place(1, 9)")[0] == pytest.approx(x, abs=2), "what is under the pointer stays there"
    picture(found, "zoomed")


def test_dragging_moves_and_does_not_select(show: Callable[..., Any]) -> None:
    found = show(*three())
    keys(found, "+", "+")
    x, y = ask(found, "page.place(1, 9)")
    before = ask(found, "page.range()")
    chain = ActionChains(found)
    chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))
    chain.click_and_hold().move_by_offset(-120, 0).release().perform()
    settle(found)
    after = ask(found, "page.range()")
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
    assert ask(found, "page.place(1, 9)")[0] == pytest.approx(x - 120, abs=3)
    assert ask(found, "page.state.timeline") is None


def test_a_click_shows_details(show: Callable[..., Any]) -> None:
    documents = three()
    found = show(*documents)
    chosen = next(i for i, t in enumerate(documents[1].tasks) if "layers.1.all_reduce" in t.name)
    click(found, 1, chosen)
    text = details(found)
    task = documents[1].tasks[chosen]
    for told in (task.name, "link (16 SMs, priority -1)", "network", "84%", "32 MiB", "bfloat16 [4, 512, 8192]",
                 "waited for", "waiting for it", "micro-batch", "4 rows", "elsewhere"):  # fmt: skip
        assert told in text, told
    picture(found, "details")
    keys(found, "f", "-", "-")
    picture(found, "arrows")
    waited = found.find_element(By.CSS_SELECTOR, "#details .link")
    name = waited.text
    waited.click()
    assert found.find_element(By.CSS_SELECTOR, "#details h2").text == name, "what it waited for is one click away"
    assert ask(found, "document.activeElement.id") == "details", "a reader stays where the details are"
    keys(found, Keys.ESCAPE)
    assert not found.find_element(By.ID, "details").is_displayed()


def test_a_click_does_not_move_what_is_in_view(show: Callable[..., Any]) -> None:
    """Even if the task is wider than the screen."""
    found = show(run(2))
    found.execute_script("const t = page.timelines[0], s = t.start(9), e = t.end(9);"
                         "page.look(s + 0.6 * (e - s), s + 0.8 * (e - s))")  # fmt: skip
    settle(found)
    before = ask(found, "page.range()")
    canvas = found.find_element(By.TAG_NAME, "canvas")
    box = "page.timelines[0].canvas.getBoundingClientRect()"
    down = ask(found, f"page.place(0, 9)[1] - {box}.top - {box}.height / 2")  # of the middle, where the task is
    ActionChains(found).move_to_element_with_offset(canvas, 0, round(down)).click().perform()
    settle(found)
    assert ask(found, "page.state.task") == 9 and ask(found, "page.range()") == before


def test_two_are_compared(show: Callable[..., Any]) -> None:
    found = show(run(1), run(2))
    one, two = run(1).length, run(2).length
    verdicts = [e for e in found.find_elements(By.CSS_SELECTOR, ".verdict") if e.is_displayed()]
    (verdict,) = [e.text for e in verdicts]
    assert "saved" in verdict and f"{one / two:.2f}\u00d7" in verdict and f"{100 * (one - two) / one:.0f}%" in verdict
    picture(found, "compared")
    found.find_element(By.CSS_SELECTOR, "#base option[value='1']").click()
    (verdict,) = [e.text for e in found.find_elements(By.CSS_SELECTOR, ".verdict") if e.is_displayed()]
    assert "longer" in verdict, "the other way round"
    found.find_element(By.CSS_SELECTOR, "#base option[value='none']").click()
    assert not any(e.is_displayed() for e in found.find_elements(By.CSS_SELECTOR, ".verdict"))


def test_the_keys(show: Callable[..., Any]) -> None:
    found = show(*three())
    before = ask(found, "page.range()")
    keys(found, "+")
    zoomed = ask(found, "page.range()")
    assert zoomed[1] - zoomed[0] < before[1] - before[0]
    keys(found, Keys.ARROW_RIGHT)
    assert ask(found, "page.range()")[0] > zoomed[0]
    keys(found, "0")
    assert ask(found, "page.range()") == pytest.approx(before)
    keys(found, "n", "n", "n", "p")
    assert ask(found, "page.timelines.indexOf(page.state.timeline)") == 0
    assert ask(found, "page.state.timeline.place[page.state.task]") == 1
    assert "model.layers.0" in ask(found, "document.getElementById('said').textContent"), "told to a screen reader"
    keys(found, Keys.ENTER)
    assert ask(found, "document.activeElement.id") == "details"
    keys(found, "f")
    close = ask(found, "page.range()")
    assert close[1] - close[0] < 0.7 * (before[1] - before[0])
    keys(found, Keys.ESCAPE)
    assert ask(found, "page.state.timeline") is None
    keys(found, "?")
    assert found.find_element(By.ID, "keys").is_displayed()
    keys(found, Keys.ESCAPE, "/", "layers.2.mlp", Keys.ENTER)
    assert "layers.2.mlp" in details(found)
    keys(found, Keys.ESCAPE, "0", "c")
    assert found.find_element(By.ID, "critical").get_attribute("aria-pressed") == "true"
    picture(found, "critical")


def test_every_control_can_be_reached_and_has_a_name(show: Callable[..., Any]) -> None:
    found = show(*three())
    controls = "[...document.querySelectorAll('button, input, select, canvas')]"
    named = "e => e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length"
    assert ask(found, f"{controls}.every({named})")
    reached = set()
    for _ in range(14):
        keys(found, Keys.TAB)
        reached.add(ask(found, "document.activeElement.id || document.activeElement.tagName"))
    assert {"find", "base", "in", "fit", "out", "critical", "theme", "help", "CANVAS"} <= reached, "and no trap"


def test_the_table_of_tasks(show: Callable[..., Any]) -> None:
    found = show(run(2), many(250))
    found.find_element(By.CSS_SELECTOR, "#tasks summary").click()
    settle(found)
    rows = found.find_elements(By.CSS_SELECTOR, "#table tbody tr")
    assert len(rows) == 100 and "1 to 100 of 274" in found.find_element(By.CSS_SELECTOR, ".turn").text
    later = [b for b in found.find_elements(By.CSS_SELECTOR, ".turn button") if b.text == "Later"]
    later[0].click()
    assert "101 to 200" in found.find_element(By.CSS_SELECTOR, ".turn").text
    link = found.find_element(By.CSS_SELECTOR, "#table .link")
    found.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
    link.click()
    settle(found)
    assert found.find_element(By.ID, "details").is_displayed()
    box = "page.state.timeline.canvas.getBoundingClientRect()"
    assert ask(found, f"{box}.bottom > 0 && {box}.top < innerHeight"), "and where it is can be seen"


def test_dark_and_light(show: Callable[..., Any]) -> None:
    found = show(*three(), dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = ask(found, ground)
    click(found, 1, 3)
    picture(found, "dark")
    found.find_element(By.ID, "theme").click()
    assert ask(found, ground) != dark


def test_a_narrow_screen(show: Callable[..., Any]) -> None:
    found = show(*three(), width=500)
    click(found, 1, 3)
    assert ask(found, "document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    picture(found, "narrow", whole=True)


def test_names_stay_text(show: Callable[..., Any]) -> None:
    name = "</script><script>document.title='broken'</script><img src=x onerror=document.title='broken'>"
    found = show(Document(title=name, source="measured", lanes=(Lane(name=name),), tasks=(
        TimedTask(name=name, lane=name, start=0.0, end=1.0, note=name, tags=(name,)),)))  # fmt: skip
    click(found, 0, 0)
    assert name in details(found) and found.title == name


def test_nothing_and_a_single_moment(show: Callable[..., Any]) -> None:
    found = show(Document(title="empty", source="planned", lanes=(Lane(name="main"),), tasks=()))
    assert "the uncut graph" in found.find_element(By.ID, "timelines").text
    keys(found, "n", "+", "0", Keys.ARROW_DOWN)
    found = show(Document(title="short", source="measured", lanes=(Lane(name="main"),), tasks=(
        TimedTask(name="a", lane="main", start=5.0, end=5.0),)))  # fmt: skip
    assert ask(found, "page.drawn()") == 1


def test_twenty_thousand_tasks(show: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    found = show(many(20_000))
    opened = time.perf_counter() - began
    assert ask(found, "page.drawn()") == 20_000, "each is in some pixel"
    picture(found, "many")
    script = """
        const done = arguments[0], canvas = page.timelines[0].canvas, box = canvas.getBoundingClientRect(), times = [];
        const before = page.frames.length;
        let left = 60, last = null;
        const next = now => {
          if (last !== null) times.push(now - last);
          last = now;
          if (!left--) return done({ times, drawn: page.frames.slice(before) });
          const at = { clientX: box.left + box.width / 2, clientY: box.top + 40, bubbles: true, cancelable: true };
          canvas.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: left < 30 ? 100 : -100 }));
          requestAnimationFrame(next);
        };
        requestAnimationFrame(next);"""
    told = found.execute_async_script(script)
    frame, drawing = statistics.median(told["times"]), statistics.median(told["drawn"])
    with capsys.disabled():
        print(f"\n20,000 tasks: opened in {opened:.1f} s; a frame takes {frame:.1f} ms, of which drawing {drawing:.1f} "
              f"(medians), the longest {max(told['times']):.0f}")  # fmt: skip
    assert 0 < len(told["drawn"]) <= 60, "one drawing a frame at most, however many events there are"
    keys(found, "0")
    click(found, 0, 9_999)
    assert "layers." in details(found)


def test_printing(show: Callable[..., Any]) -> None:
    found = show(*three(), dark=True)
    made = found.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
    paper = base64.b64decode(made["data"])
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "printed.pdf").write_bytes(paper)
    assert paper.startswith(b"%PDF") and len(paper) > 20_000
    settle(found)
    assert ask(found, "document.documentElement.dataset.theme") == "dark", "the screen is as it was"
    found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    found.execute_script("dispatchEvent(new Event('beforeprint'))")
    shown = ask(found, "['legend', 'summaries', 'timelines'].every(id => document.getElementById(id).offsetHeight > 0)")
    assert shown and ask(found, "getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not found.find_element(By.CLASS_NAME, "tools").is_displayed()
    picture(found, "printed", whole=True)
    found.execute_script("dispatchEvent(new Event('afterprint'))")
    found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
