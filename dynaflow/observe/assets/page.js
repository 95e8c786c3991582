"use strict";
/* The page: what is in view, what is selected, and what pointer and keys do to both. */

const page = (() => {
  const $ = id => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const timelines = data.documents.map((d, n) => new Timeline(d, n, data.kinds, data.colours));
  const whole = Math.max(...timelines.map(t => t.length)) || 1;
  const all = { from: -0.01 * whole, to: 1.03 * whole };
  const view = { ...all };
  const state = {
    timeline: null, task: -1, kind: null, critical: false, found: null, against: "own",
    base(timeline) {
      if (this.against === "none") return null;
      const n = this.against === "own" ? timeline.data.base : +this.against;
      const base = n === null ? null : timelines[n];
      return base && base !== timeline && base.data.unit === timeline.data.unit ? base : null;
    },
  };
  const frames = [];  // how long the last drawings took, in ms
  let theme, dirty = false;

  // Drawing

  function readTheme() {
    const style = getComputedStyle(document.documentElement), get = name => style.getPropertyValue(name).trim();
    const font = get("--font"), made = new Map();
    const pattern = (c, key, paint) => {
      if (!made.has(key)) {
        const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
        paint(tile.getContext("2d"));
        made.set(key, c.createPattern(tile, "repeat"));
      }
      return made.get(key);
    };
    const slant = (t, colour, width) => {
      t.strokeStyle = colour;
      t.lineWidth = width;
      t.beginPath();
      for (const x of [-8, 0, 8]) { t.moveTo(x - 1, 9); t.lineTo(x + 9, -1); }
      t.stroke();
    };
    const kinds = Array.from({ length: data.colours }, (_, n) => get(`--kind${n}`));
    theme = {
      ink: get("--ink"), soft: get("--soft"), line: get("--line"), paper: get("--paper"), saved: get("--saved"),
      lost: get("--lost"), into: get("--into"), out: get("--out"), other: get("--other"), onOther: get("--on-other"),
      curve: get("--curve"), curveLine: get("--curve-line"), kinds, onKinds: kinds.map(readable),
      small: `11px ${font}`, bold: `600 12px ${font}`,
      stripes: (c, colour) => pattern(c, colour, t => {
        t.fillStyle = colour;
        t.fillRect(0, 0, 8, 8);
        t.globalAlpha = 0.55;
        slant(t, get("--paper"), 1.6);
      }),
      hatch: (c, colour) => pattern(c, "hatch" + colour, t => { t.globalAlpha = 0.3; slant(t, colour, 1.2); }),
    };
  }

  function readable(colour) {
    const [r, g, b] = [1, 3, 5].map(n => parseInt(colour.slice(n, n + 2), 16) / 255);
    return 0.2126 * r ** 2.2 + 0.7152 * g ** 2.2 + 0.0722 * b ** 2.2 > 0.2 ? "#111111" : "#ffffff";
  }

  function draw(sharp = 1, paper = 0) {
    const began = performance.now();
    dirty = false;
    for (const timeline of timelines) {
      const { canvas } = timeline, width = paper || canvas.clientWidth, dots = Math.max(devicePixelRatio || 1, sharp);
      if (!width) continue;
      const [w, h] = [Math.round(width * dots), Math.round(timeline.height * dots)];
      if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
      const c = canvas.getContext("2d");
      c.setTransform(dots, 0, 0, dots, 0, 0);
      timeline.draw(c, width, view, state, theme);
    }
    showOverview();
    frames.push(performance.now() - began);
    if (frames.length > 240) frames.shift();
  }

  function redraw() {
    if (dirty) return;
    dirty = true;
    requestAnimationFrame(() => draw());
  }

  function showOverview() {
    const share = t => Math.max(0, Math.min(1, (t - all.from) / (all.to - all.from)));
    for (const { window: mark } of timelines) {
      mark.hidden = view.from <= all.from && view.to >= all.to;
      mark.style.left = `${100 * share(view.from)}%`;
      mark.style.width = `${Math.max(0.5, 100 * (share(view.to) - share(view.from)))}%`;
    }
  }

  // What is in view

  function look(from, to) {
    const most = 1.5 * (all.to - all.from), least = whole * 1e-7;
    const range = Math.min(most, Math.max(least, to - from)), middle = (from + to) / 2;
    const a = Math.max(all.from - range * 0.6, Math.min(all.to - range * 0.4, middle - range / 2));
    Object.assign(view, { from: a, to: a + range });
    redraw();
  }

  function zoom(by, at = (view.from + view.to) / 2) {
    look(at - (at - view.from) * by, at + (view.to - at) * by);
  }

  function move(share) {
    const by = share * (view.to - view.from);
    look(view.from + by, view.to + by);
  }

  function fit() { look(all.from, all.to); }

  function reveal(timeline, i) {
    const start = timeline.start(i), end = timeline.end(i), range = view.to - view.from;
    if (end < view.from || start > view.to) look(start - range * 0.4, start + range * 0.6);
  }

  // What is selected

  function select(timeline, i, close = false) {
    Object.assign(state, { timeline, task: i });
    if (timeline) {
      if (close) {
        const wide = Math.max(timeline.end(i) - timeline.start(i), whole * 1e-6);
        look(timeline.start(i) - 3 * wide, timeline.end(i) + 3 * wide);
      }
      reveal(timeline, i);
      const reading = $("details").contains(document.activeElement);  // whose button is about to be replaced
      showDetails($("details"), timelines, timeline, i, select, clear);
      if (reading) $("details").focus();
      $("said").textContent = describe(timeline, i);
    } else $("details").hidden = true;
    redraw();
  }

  /* From a table further down: back to where the task is. */
  function go(timeline, i) {
    select(timeline, i);
    timeline.canvas.parentElement.scrollIntoView({ block: "nearest" });
  }

  function clear() {
    const held = $("details").contains(document.activeElement) && state.timeline;
    if (held) held.canvas.focus();
    select(null, -1);
  }

  function step(by) {
    const timeline = state.timeline || timelines.find(t => t.tasks.length);
    if (!timeline) return;
    if (!state.timeline) {
      const first = timeline.order.find(i => timeline.end(i) >= view.from && timeline.start(i) <= view.to);
      return select(timeline, first ?? timeline.order[0]);
    }
    const at = timeline.place[state.task] + by;
    if (at >= 0 && at < timeline.order.length) select(timeline, timeline.order[at]);
  }

  function otherLane(by) {
    const { timeline, task } = state;
    if (!timeline) return step(0);
    const middle = (timeline.start(task) + timeline.end(task)) / 2;
    for (let lane = timeline.tasks[task].lane + by; lane >= 0 && lane < timeline.data.lanes.length; lane += by) {
      const there = timeline.order.filter(i => timeline.tasks[i].lane === lane);
      if (!there.length) continue;
      const away = i => Math.max(timeline.start(i) - middle, middle - timeline.end(i), 0);
      return select(timeline, there.reduce((a, b) => (away(b) < away(a) ? b : a)));
    }
    const other = timelines[timeline.number + by];
    if (other && other.byName.has(timeline.key[task])) select(other, other.byName.get(timeline.key[task]));
  }

  function find(text) {
    const wanted = text.trim().toLowerCase();
    state.found = wanted ? task => task.name.toLowerCase().includes(wanted) : null;
    if ($("tasks").open) showTable($("table"), timelines, state.found, go);
    redraw();
  }

  function nextFound() {
    if (!state.found) return;
    const matches = timelines.flatMap(t => t.order.filter(i => state.found(t.tasks[i])).map(i => [t, i]));
    const now = matches.findIndex(([t, i]) => t === state.timeline && i === state.task);
    if (matches.length) select(...matches[(now + 1) % matches.length]);
    else $("said").textContent = "no task has such a name";
  }

  // The parts of the page

  function build() {
    for (const timeline of timelines) {
      const { data: d } = timeline, lanes = d.lanes.length === 1 ? "1 lane" : `${d.lanes.length} lanes`;
      const count = `${d.tasks.length} tasks on ${lanes}`;
      timeline.canvas = make("canvas", { tabIndex: 0, style: `height:${timeline.height}px`, data: {
        role: "application", "aria-roledescription": "timeline", "aria-label":
          `${d.source}: ${d.title}, ${clock(d.end - d.begin, d.unit)}, ${count}. n and p go through its tasks, ? lists the keys.` } });
      timeline.window = make("i");
      timeline.verdict = make("span", { className: "verdict" });
      const stretched = d.unit === "steps" && d.scale !== 1 ? " · every task as one step, stretched to the others" : "";
      $("timelines").append(make("section", { className: "timeline" },
        make("h2", {}, badge(d.source), make("span", { className: "name" }, d.title),
          make("span", { className: "length" }, clock(d.end - d.begin, d.unit)), timeline.verdict,
          make("small", {}, (d.device ? `${d.device} · ` : "") + count + stretched)),
        make("div", { className: "overview", data: { "aria-hidden": "true" } }, timeline.window),
        d.tasks.length ? null : make("p", { className: "note" }, "No tasks: the uncut graph runs, in sequence."),
        timeline.canvas));
      listen(timeline);
    }
    const each = timelines.map((t, n) => [`${n}`, `${t.data.source}: ${t.data.title}`]);
    const options = [["own", "the first of its source"], ...each, ["none", "nothing"]];
    $("base").append(...options.map(([value, text]) => make("option", { value }, text)));
    $("base").parentElement.hidden = timelines.length < 2;
    buildLegend();
    showSummaries($("summaries"), timelines, go);
    compare();
  }

  function buildLegend() {
    const shown = data.kinds.slice(0, 2 * data.colours), more = data.kinds.length - shown.length;
    $("legend").replaceChildren(
      ...shown.map((name, n) => make("button", { type: "button", data: { "aria-pressed": "false" }, title: "Show only these",
        on: { click: event => showKind(n, event.currentTarget) } },
        make("i", { className: n < data.colours ? "" : "striped", style: `--c:var(--kind${n % data.colours})` }), name)),
      more > 0 ? make("span", { className: "more" }, make("i", { style: "--c:var(--other)" }), `${more} other kinds`) : "",
      make("span", { className: "more" }, make("i", { className: "path" }), "on the critical path"));
  }

  function showKind(n, button) {
    state.kind = state.kind === n ? null : n;
    for (const other of $("legend").querySelectorAll("button"))
      other.setAttribute("aria-pressed", `${other === button && state.kind === n}`);
    redraw();
  }

  function compare() {
    for (const timeline of timelines) {
      const base = state.base(timeline);
      timeline.verdict.hidden = !base;
      if (!base) continue;
      const by = timeline.length ? base.length / timeline.length : 1;
      timeline.verdict.textContent = `${saved(timeline, base)}, ${by.toFixed(2)}×`;
      timeline.verdict.title = `against ${base.data.title}`;
      timeline.verdict.classList.toggle("worse", base.length < timeline.length);
    }
    redraw();
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    readTheme();
    redraw();
  }

  function toggleCritical() {
    state.critical = !state.critical;
    $("critical").setAttribute("aria-pressed", `${state.critical}`);
    redraw();
  }

  // Pointer and keys

  function listen(timeline) {
    const { canvas } = timeline, down = new Map();
    let dragged = 0;
    const spot = event => {
      const box = canvas.getBoundingClientRect(), left = gutter(box.width), x = event.clientX - box.left - left;
      const scale = (view.to - view.from) / (box.width - left);
      return { time: view.from + x * scale, y: event.clientY - box.top, scale, lanes: x < 0 };
    };
    const under = event => {
      const { time, y, scale, lanes } = spot(event);
      return lanes ? -1 : timeline.at(time, y, 3 * scale);
    };
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      const size = event.deltaMode === 1 ? 16 : 1, dx = event.deltaX * size, dy = event.deltaY * size;
      if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) move((dx || dy) / canvas.clientWidth);
      else zoom(Math.exp(Math.max(-240, Math.min(240, dy)) / 320), spot(event).time);
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      down.set(event.pointerId, event);
      dragged = down.size > 1 ? Infinity : 0;
    });
    canvas.addEventListener("pointermove", event => {
      const before = down.get(event.pointerId);
      if (!before) return hint(event, timeline, under(event));
      hint();
      const [one, two] = [...down.values()], { scale } = spot(event);
      if (two) {  // two fingers: what is under them stays under them
        const other = before === one ? two : one, wide = Math.abs(before.clientX - other.clientX);
        zoom(Math.max(8, wide) / Math.max(8, Math.abs(event.clientX - other.clientX)), spot(other).time);
      } else {
        dragged += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
        const by = (event.clientX - before.clientX) * scale;
        if (dragged > 3) look(view.from - by, view.to - by);
      }
      down.set(event.pointerId, event);
    });
    canvas.addEventListener("pointerup", event => {
      if (down.delete(event.pointerId) && dragged <= 3) {
        const i = under(event);
        select(i < 0 ? null : timeline, i);
      }
    });
    canvas.addEventListener("pointercancel", event => down.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => hint());
    canvas.addEventListener("dblclick", event => {
      const i = under(event);
      if (i >= 0) select(timeline, i, true);
    });
  }

  function hint(event, timeline, i = -1) {
    const box = $("hint");
    box.hidden = i < 0;
    if (i < 0) return;
    const task = timeline.tasks[i];
    box.replaceChildren(make("b", {}, task.name), ` ${clock(task.end - task.start, timeline.data.unit)}`);
    box.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${event.clientY + 18}px`;
  }

  const keys = {
    "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), "0": fit,
    ArrowLeft: event => move(event.shiftKey ? -0.5 : -0.1), ArrowRight: event => move(event.shiftKey ? 0.5 : 0.1),
    ArrowUp: () => otherLane(-1), ArrowDown: () => otherLane(1), n: () => step(1), p: () => step(-1),
    f: () => state.timeline && select(state.timeline, state.task, true), c: toggleCritical,
    d: () => $("theme").click(), "/": () => $("find").focus(), "?": () => $("keys").showModal(), Escape: clear,
    Enter: () => { if (state.timeline) $("details").focus(); else step(0); },
  };
  document.addEventListener("keydown", event => {
    const key = keys[event.key], on = event.target;
    if (!key || event.ctrlKey || event.metaKey || event.altKey || $("keys").open || on.matches("input, select")) return;
    const presses = event.key === "Enter" && on.matches("button, a, summary");
    const scrolls = ["ArrowUp", "ArrowDown"].includes(event.key)
      && ($("details").contains(on) || (on === document.body && !state.timeline));
    if (presses || scrolls) return;
    event.preventDefault();
    key(event);
  });

  $("in").onclick = keys["+"];
  $("out").onclick = keys["-"];
  $("fit").onclick = fit;
  $("critical").onclick = toggleCritical;
  $("help").onclick = keys["?"];
  $("theme").onclick = () => setTheme(dark() ? "light" : "dark");
  $("base").onchange = event => { state.against = event.target.value; compare(); };
  $("find").oninput = event => find(event.target.value);
  $("find").onkeydown = event => {
    if (event.key === "Enter") nextFound();
    else if (event.key === "Escape") { event.target.value = ""; find(""); event.target.blur(); }
  };
  $("tasks").ontoggle = () => $("tasks").open && showTable($("table"), timelines, state.found, go);

  const darkness = matchMedia("(prefers-color-scheme: dark)");
  function dark() { return document.documentElement.dataset.theme === "dark"; }
  darkness.onchange = () => setTheme(darkness.matches ? "dark" : "light");

  // Paper is white and shows all of it, sharp; the screen is as it was afterwards. The paper's width can't be asked for
  // before it is printed on: that of A4 is taken, as the style does.
  const A4 = 1004;
  let screen = null;
  addEventListener("beforeprint", () => {
    screen = { ...view, theme: document.documentElement.dataset.theme };
    Object.assign(view, all);
    setTheme("light");
    draw(3, A4);
  });
  addEventListener("afterprint", () => {
    if (!screen) return;
    Object.assign(view, { from: screen.from, to: screen.to });
    setTheme(screen.theme);
    screen = null;
  });

  build();
  setTheme(darkness.matches ? "dark" : "light");
  new ResizeObserver(redraw).observe($("timelines"));
  draw();

  /* For the console and for tests. */
  return {
    timelines, state, frames, select, zoom, look,
    range: () => [view.from, view.to],
    drawn: () => timelines.reduce((sum, t) => sum + t.drawn, 0),
    place(n, i) {  // where a task is on the screen
      const t = timelines[n], box = t.canvas.getBoundingClientRect(), left = gutter(box.width), { y, h } = t.box(i);
      const scale = (box.width - left) / (view.to - view.from), middle = (t.start(i) + t.end(i)) / 2;
      return [box.left + left + (middle - view.from) * scale, box.top + y + h / 2];
    },
  };
})();
