"use strict";
/* What the page says in words: a task's details, the summaries, the table of tasks. All text is set as text. */

function make(tag, given = {}, ...inside) {
  const { on, data, ...rest } = given;
  const found = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(data || {})) found.setAttribute(name, value);
  for (const [name, listener] of Object.entries(on || {})) found.addEventListener(name, listener);
  found.append(...inside.filter(x => x !== null && x !== undefined));
  return found;
}

function badge(source) { return make("span", { className: `badge ${source}` }, source); }

function describe(timeline, i) {
  const task = timeline.tasks[i], lane = timeline.data.lanes[task.lane];
  return `${task.name}, on ${lane.name}, ${clock(task.end - task.start, timeline.data.unit)}` +
    ` from ${clock(task.start - timeline.data.begin, timeline.data.unit)}` +
    (timeline.onPath[i] ? ", on the critical path" : "");
}

function showDetails(panel, timelines, timeline, i, go, close) {
  const task = timeline.tasks[i], { unit, begin, lanes } = timeline.data, lane = lanes[task.lane];
  const time = seconds => clock(seconds, unit);
  const link = (other, of = timeline, text = of.tasks[other].name) =>
    make("button", { className: "link", type: "button", on: { click: () => go(of, other) } }, text);
  const terms = make("dl");
  const term = (name, ...values) => {
    if (values.length) terms.append(make("dt", {}, name), ...values.map(v => make("dd", {}, v)));
  };
  const list = (name, values) => term(name, ...values);

  term("time", `${time(task.end - task.start)}, from ${time(task.start - begin)} to ${time(task.end - begin)}`);
  const notes = [lane.sms ? `${lane.sms} SMs` : "", lane.priority ? `priority ${lane.priority}` : ""].filter(Boolean);
  term("lane", lane.name + (notes.length ? ` (${notes.join(", ")})` : ""));
  if (task.op && task.op !== task.name) list("operator", task.op.split(" + "));
  if (task.micro_batches) term("micro-batch", task.micro_batches.join(", ") + (task.rows ? ` (${task.rows} rows)` : ""));
  else if (task.rows) term("rows", `${task.rows}`);
  if (task.tags) term("tags", make("span", {}, ...task.tags.map(tag => make("span", { className: "tag" }, tag))));
  if (task.uses && Object.keys(task.uses).length) term("resource", meters(task.uses));
  if (task.bytes) term("moves", amount(task.bytes, "bytes"));

  const waited = waits(timeline, i).map(({ other, why, gap }) =>
    make("span", {}, link(other), make("small", {}, ` ${why}${gap ? `, ${gap}` : ""}`)));
  list("waited for", waited.length ? waited : ["nothing that is known"]);
  const next = timeline.next[i];
  list("waiting for it", next.slice(0, 12).map(n => link(n)).concat(next.length > 12 ? [`and ${next.length - 12} more`] : []));
  list("inputs", task.reads || []);
  list("outputs", task.writes || []);
  const same = timelines.filter(t => t !== timeline && t.byName.has(timeline.key[i]));
  list("elsewhere", same.map(other => {
    const n = other.byName.get(timeline.key[i]), there = other.tasks[n];
    return make("span", {}, link(n, other, clock(there.end - there.start, other.data.unit)),
      make("small", {}, ` ${other.data.source}: ${other.data.title}`));
  }));
  if (task.note) term("note", task.note);

  panel.replaceChildren(
    make("div", { className: "head" },
      make("h2", {}, task.name),
      make("button", { className: "close", type: "button", title: "Close (Esc)", data: { "aria-label": "Close" },
        on: { click: close } }, "×")),
    make("p", { className: "where" }, badge(timeline.data.source), ` ${timeline.data.title}`,
      timeline.onPath[i] ? make("span", { className: "tag strong" }, "critical path") : null),
    terms);
  panel.hidden = false;
}

function meters(uses) {
  const all = Object.entries(uses).sort((a, b) => b[1] - a[1]);
  return make("span", { className: "meters" }, ...all.map(([name, share]) =>
    make("span", { className: "meter" }, make("span", {}, name),
      make("span", { className: "bar" }, make("i", { style: `width:${Math.min(100, 100 * share)}%` })),
      make("span", { className: "number" }, amount(share, "fraction")))));
}

/* What a task waited for, the one that held it up longest first. */
function waits(timeline, i) {
  const task = timeline.tasks[i], all = new Set(task.after || []);
  if (task.held >= 0) all.add(task.held);
  const { unit } = timeline.data;
  return [...all].sort((a, b) => (b === task.held) - (a === task.held) || timeline.tasks[b].end - timeline.tasks[a].end)
    .map(other => {
      const idle = task.start - timeline.tasks[other].end, lane = timeline.data.lanes[timeline.tasks[other].lane].name;
      const why = timeline.tasks[other].lane === task.lane ? "before it on its lane" : `on ${lane}`;
      const near = Math.abs(idle) < 1e-6 * (timeline.data.end - timeline.data.begin);
      const ended = near ? "ended as this began" : `ended ${clock(Math.abs(idle), unit)} ${idle < 0 ? "after this began" : "before"}`;
      return { other, why, gap: other === task.held ? ended : "" };
    });
}

function showSummaries(where, timelines, go) {
  where.replaceChildren(...timelines.map(timeline => {
    const { data } = timeline, time = value => clock(value, data.unit), total = data.end - data.begin;
    const part = value => (total ? `${(100 * value / total).toFixed(1)}%` : "–");
    const path = table(["on the critical path", "tasks", "time", "of all"], [
      ...data.onPath.slice(0, 8).map(([name, seconds, count]) => [name, `${count}`, time(seconds), part(seconds)]),
      ...rest(data.onPath.slice(8), time, part),
      ...(data.waiting > 1e-9 * total ? [["between its tasks", "", time(data.waiting), part(data.waiting)]] : []),
    ]);
    const idle = table(["lane", "tasks", "busy", "idle", "idle for"], data.lanes.map((lane, n) => {
      const use = data.use[n];
      const causes = use.causes.slice(0, 3).map(([name, seconds]) => make("div", {}, `${time(seconds)} ${name}`));
      if (use.causes.length > 3) causes.push(make("div", {}, `and ${use.causes.length - 3} more`));
      return [lane.name, `${use.tasks}`, part(use.busy), use.idle ? `${time(use.idle)} (${part(use.idle)})` : "0",
        causes.length ? make("div", {}, ...causes) : "–"];
    }));
    const first = data.path.length ? make("button", { className: "link", type: "button",
      on: { click: () => go(timeline, data.path[0]) } }, "go to its start") : null;
    const cross = data.tasks.some(task => task.after && task.after.length);
    return make("section", { className: "summary" },
      make("h2", {}, badge(data.source), ` ${data.title}`, make("small", {}, ` ${time(total)}`)),
      make("div", { className: "tables" },
        make("div", {}, make("h3", {}, `Critical path: ${data.path.length} of ${data.tasks.length} tasks `, first),
          cross || data.lanes.length < 2 ? null
            : make("p", { className: "note" }, "The file says of no task what it waits for: the path follows one lane."),
          path),
        make("div", { className: "idle" }, make("h3", {}, "Idle time of each lane"), idle)));
  }));
}

function rest(shares, time, part) {
  if (!shares.length) return [];
  const seconds = shares.reduce((sum, share) => sum + share[1], 0), count = shares.reduce((sum, share) => sum + share[2], 0);
  return [[`${shares.length} other kinds`, `${count}`, time(seconds), part(seconds)]];
}

function table(head, rows) {
  return make("div", { className: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map(text => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map(cell => make("td", {}, cell)))))));
}

/* The tasks as rows, a hundred at a time: all at once would be what a canvas is there to avoid. */
function showTable(where, timelines, found, go, from = 0) {
  const size = 100;
  const all = timelines.flatMap(timeline => timeline.order.filter(i => !found || found(timeline.tasks[i])).map(i => [timeline, i]));
  const rows = all.slice(from, from + size).map(([timeline, i]) => {
    const task = timeline.tasks[i], { unit, begin } = timeline.data;
    return [timeline.data.source,
      make("button", { className: "link", type: "button", on: { click: () => go(timeline, i) } }, task.name),
      timeline.data.lanes[task.lane].name, (task.micro_batches || []).join(", "), (task.tags || []).join(", "),
      clock(task.start - begin, unit), clock(task.end - task.start, unit), timeline.onPath[i] ? "yes" : ""];
  });
  const turn = (text, to) => make("button", { type: "button", disabled: to < 0 || to >= all.length,
    on: { click: () => showTable(where, timelines, found, go, to) } }, text);
  where.replaceChildren(
    table(["timeline", "task", "lane", "micro-batch", "tags", "start", "time", "critical"], rows),
    make("p", { className: "turn" }, turn("Earlier", from - size), turn("Later", from + size),
      ` ${all.length ? from + 1 : 0} to ${Math.min(all.length, from + size)} of ${all.length}`));
}
