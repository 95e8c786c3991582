"use strict";
/* One timeline: its tasks, indexed so that any zoom draws in about one step per pixel, and how they are drawn.
   Inside, all times are on the page's scale and start at 0. */

const ROW = 30, LEVEL = 18, CURVE = 22, AXIS = 22, GAP = 4, SHORTEST_NAME = 26;

class Timeline {
  constructor(data, number, kinds, colours) {
    Object.assign(this, { data, number, kinds, colours });
    this.tasks = data.tasks;
    this.length = (data.end - data.begin) * data.scale;
    this.onPath = new Uint8Array(this.tasks.length);
    for (const i of data.path) this.onPath[i] = 1;
    this.next = this.tasks.map(() => []);
    this.tasks.forEach((task, i) => (task.after || []).forEach(a => this.next[a].push(i)));
    this.order = this.tasks.map((_, i) => i).sort((a, b) => this.start(a) - this.start(b) || a - b);
    this.place = new Int32Array(this.tasks.length);
    this.order.forEach((i, at) => { this.place[i] = at; });
    this.rows();
    this.names();
  }

  start(i) { return (this.tasks[i].start - this.data.begin) * this.data.scale; }
  end(i) { return (this.tasks[i].end - this.data.begin) * this.data.scale; }

  /* A row for each lane and level: its tasks by start, the time they fill up to each of them, and how many of them
     are on the critical path. With such sums a pixel that holds many tasks costs no more than one that holds one. */
  rows() {
    const found = new Map();
    this.levels = this.data.lanes.map(() => 1);
    for (const i of this.order) {
      const { lane, level } = this.tasks[i];
      this.levels[lane] = Math.max(this.levels[lane], level + 1);
      const key = lane + "," + level;
      if (!found.has(key)) found.set(key, { lane, level, index: [] });
      found.get(key).index.push(i);
    }
    this.row = [...found.values()];
    for (const row of this.row) {
      row.start = Float64Array.from(row.index, i => this.start(i));
      row.end = Float64Array.from(row.index, i => this.end(i));
      row.filled = new Float64Array(row.index.length + 1);
      row.critical = new Int32Array(row.index.length + 1);
      row.index.forEach((i, at) => {
        row.filled[at + 1] = row.filled[at] + row.end[at] - row.start[at];
        row.critical[at + 1] = row.critical[at] + this.onPath[i];
      });
    }
    let y = AXIS;
    this.top = this.levels.map(levels => {
      const top = y;
      y += (levels > 1 ? levels * LEVEL : ROW) + GAP;
      return top;
    });
    this.curves = (this.data.counters || []).map(counter => {
      const top = y;
      y += CURVE + GAP;
      const most = counter.points.reduce((high, p) => Math.max(high, p[1]), counter.unit === "fraction" ? 1 : 0);
      const at = Float64Array.from(counter.points, p => (p[0] - this.data.begin) * this.data.scale);
      return { ...counter, top, at, most: most || 1 };
    });
    this.height = y + 4;
  }

  /* Of tasks that have one name, each is known by how many of it came before: so they are found in other timelines. */
  names() {
    const seen = new Map();
    this.byName = new Map();
    this.key = new Array(this.tasks.length);
    for (const i of this.order) {
      const name = this.tasks[i].name, count = seen.get(name) || 0;
      seen.set(name, count + 1);
      this.key[i] = name + "\u0000" + count;
      this.byName.set(this.key[i], i);
    }
  }

  box(i) {
    const { lane, level } = this.tasks[i];
    const high = this.levels[lane] > 1 ? LEVEL : ROW;
    return { y: this.top[lane] + level * high, h: high - (high === LEVEL ? 2 : 0) };
  }

  /* The task at a time and a height, or -1; `near` is how far beside it counts, too. */
  at(time, y, near) {
    let best = -1, closest = Infinity;
    for (const row of this.row) {
      const { y: top, h } = this.box(row.index[0]);
      if (y < top || y >= top + h) continue;
      const after = above(row.start, time);
      for (let at = Math.max(0, after - 2); at < Math.min(row.index.length, after + 2); at++) {
        const away = Math.max(row.start[at] - time, time - row.end[at], 0);
        if (away <= near && away < closest) [best, closest] = [row.index[at], away];
      }
    }
    return best;
  }

  draw(c, width, view, state, theme) {
    const left = gutter(width), scale = (width - left) / (view.to - view.from);
    const x = time => left + (time - view.from) * scale;
    const at = { c, width, left, view, scale, x, state, theme };
    c.clearRect(0, 0, width, this.height);
    const tag = this.tag(at);
    this.drawAxis(at, tag);
    c.save();
    c.beginPath();
    c.rect(left, 0, width - left, this.height);
    c.clip();
    this.drawSaved(at);
    this.drawn = 0;
    for (const row of this.row) this.drawRow(at, row);
    for (const curve of this.curves) this.drawCurve(at, curve);
    if (state.critical) this.drawPath(at);
    const chosen = this.chosen(state);
    if (chosen >= 0) {
      this.outline(at, chosen, state.timeline === this);
      if (state.timeline === this) this.drawArrows(at, chosen);
    }
    c.restore();
    this.drawLanes(at);
    if (tag) this.drawTag(at, tag);
  }

  /* What is selected here: the task itself, or the same one where another timeline's is. */
  chosen({ timeline, task }) {
    if (!timeline) return -1;
    return timeline === this ? task : this.byName.get(timeline.key[task]) ?? -1;
  }

  drawAxis({ c, width, left, view, x, theme }, tag) {
    const to = this.data.scale, unit = this.data.unit;
    const step = tick((view.to - view.from) / to, Math.max(2, (width - left) / 110), unit);
    c.font = theme.small;
    c.textBaseline = "middle";
    c.textAlign = "left";
    for (let n = Math.ceil(view.from / to / step); n * step * to <= view.to; n++) {
      const px = Math.round(x(n * step * to)) + 0.5;
      c.strokeStyle = theme.line;
      c.lineWidth = 1;
      c.beginPath();
      c.moveTo(px, AXIS - 6);
      c.lineTo(px, this.height);
      c.stroke();
      c.fillStyle = theme.soft;
      const text = clock(n * step, unit, step), end = px + 4 + c.measureText(text).width;
      if (end < width && !(tag && end > tag.from && px < tag.from + tag.wide)) c.fillText(text, px + 4, AXIS / 2);
    }
  }

  drawSaved({ c, x, width, left, state, theme }) {
    const base = state.base(this);
    if (!base) return;
    const from = x(Math.min(this.length, base.length)), to = x(Math.max(this.length, base.length));
    const shorter = this.length <= base.length;
    if (to < left || from > width) return;
    c.fillStyle = theme.hatch(c, shorter ? theme.saved : theme.lost);
    c.fillRect(from, AXIS, to - from, this.height - AXIS);
    c.strokeStyle = shorter ? theme.saved : theme.lost;
    c.lineWidth = 1.5;
    for (const px of [from, to]) {
      c.beginPath();
      c.moveTo(px, AXIS);
      c.lineTo(px, this.height);
      c.stroke();
    }
  }

  /* What the hatching means, and where that is said: above its end. */
  tag({ c, x, width, left, state, theme }) {
    const base = state.base(this);
    if (!base) return null;
    const ends = [this.length, base.length].map(x), to = Math.max(...ends);
    if (to < left || Math.min(...ends) > width) return null;
    c.font = theme.bold;
    const text = saved(this, base), wide = c.measureText(text).width + 14;
    return { text, wide, from: Math.max(left, Math.min(to, width - 1) - wide), good: this.length <= base.length };
  }

  drawTag({ c, theme }, { text, from, wide, good }) {
    c.font = theme.bold;
    c.fillStyle = good ? theme.saved : theme.lost;
    c.beginPath();
    c.roundRect(from, 1, wide, AXIS - 3, 4);
    c.fill();
    c.fillStyle = theme.paper;
    c.textAlign = "left";
    c.textBaseline = "middle";
    c.fillText(text, from + 7, AXIS / 2);
  }

  drawRow(at, row) {
    const { view, scale, x, state } = at;
    const { y, h } = this.box(row.index[0]);
    const pixel = 1 / scale;
    const dim = state.kind !== null || state.critical || state.found;
    let i = Math.max(0, above(row.start, view.from) - 1);
    for (; i < row.index.length && row.start[i] <= view.to; ) {
      const task = row.index[i];
      if ((row.end[i] - row.start[i]) * scale >= 1.5) {
        this.drawTask(at, task, x(row.start[i]), x(row.end[i]), y, h, dim && !this.lit(state, task) ? 0.18 : 1);
        this.drawn++;
        i++;
        continue;
      }
      // Thinner than a pixel: all that start in this one, as strong as they fill it.
      let next = above(row.start, row.start[i] + pixel, i);
      while (next > i + 1 && (row.end[next - 1] - row.start[next - 1]) * scale >= 1.5) next--;
      const full = Math.min(1, (row.filled[next] - row.filled[i]) * scale);
      this.drawn += next - i;
      const lit = !dim || this.anyLit(state, row, i, next);
      at.c.globalAlpha = lit ? 0.35 + 0.65 * full : 0.1;
      at.c.fillStyle = this.fill(at, this.tasks[task].kind, true);
      at.c.fillRect(x(row.start[i]), y, 1, h);
      at.c.globalAlpha = 1;
      if (row.critical[next] > row.critical[i]) this.underline(at, x(row.start[i]), 1, y, h);
      i = next;
    }
  }

  anyLit(state, row, from, to) {
    if (state.critical && row.critical[to] === row.critical[from]) return false;
    for (let i = from; i < to; i++) if (this.lit(state, row.index[i])) return true;
    return false;
  }

  lit(state, task) {
    return (state.kind === null || this.tasks[task].kind === state.kind)
      && (!state.critical || this.onPath[task] === 1)
      && (!state.found || state.found(this.tasks[task]));
  }

  fill({ c, theme }, kind, thin) {
    const { colours } = this;
    if (kind >= 2 * colours) return theme.other;
    const colour = theme.kinds[kind % colours];
    return kind < colours || thin ? colour : theme.stripes(c, colour);
  }

  drawTask(at, i, from, to, y, h, alpha) {
    const { c, theme, left, width } = at;
    const a = Math.max(from, left - 8), b = Math.min(to, width + 8), w = Math.max(1, b - a - (to - from > 4 ? 1 : 0));
    const task = this.tasks[i];
    c.globalAlpha = alpha;
    c.fillStyle = this.fill(at, task.kind, w < 4);
    if (w > 8) {
      c.beginPath();
      c.roundRect(a, y, w, h, 3);
      c.fill();
    } else c.fillRect(a, y, w, h);
    if (w >= SHORTEST_NAME) {
      const seen = Math.max(a, left);
      const text = shortened(task, Math.floor((Math.min(b, width) - seen - 9) / 6.1));
      c.font = theme.small;
      c.textBaseline = "middle";
      c.textAlign = "left";
      if (text) {
        if (task.kind >= this.colours && task.kind < 2 * this.colours) {  // stripes: the name on a quiet ground
          c.fillStyle = theme.kinds[task.kind % this.colours];
          c.fillRect(seen + 3, y + h / 2 - 7, text.length * 6.1 + 4, 14);
        }
        c.fillStyle = task.kind >= 2 * this.colours ? theme.onOther : theme.onKinds[task.kind % this.colours];
        c.fillText(text, seen + 5, y + h / 2);
      }
    }
    if (this.onPath[i]) this.underline(at, a, w, y, h);
    c.globalAlpha = 1;
  }

  underline({ c, theme }, x, w, y, h) {
    c.fillStyle = theme.ink;
    c.fillRect(x, y + h - 3, w, 3);
  }

  /* The path itself, from lane to lane, where there are few enough steps in view to follow. */
  drawPath({ c, x, view, theme }) {
    const path = this.data.path;
    c.strokeStyle = theme.ink;
    c.lineWidth = 1.5;
    for (let n = 1, count = 0; n < path.length && count < 400; n++) {
      const a = path[n - 1], b = path[n];
      if (this.end(a) > view.to || this.start(b) < view.from || this.tasks[a].lane === this.tasks[b].lane) continue;
      const one = this.box(a), two = this.box(b), down = two.y > one.y;
      c.beginPath();
      c.moveTo(x(this.end(a)), down ? one.y + one.h : one.y);
      c.lineTo(x(this.start(b)), down ? two.y : two.y + two.h);
      c.stroke();
      count++;
    }
  }

  drawArrows({ c, x, theme }, i) {
    const arrow = (from, to, colour, dash) => {
      const a = this.box(from), b = this.box(to), ay = a.y + a.h / 2, by = b.y + b.h / 2;
      const ax = Math.max(x(this.start(from)), x(this.end(from)) - 5), tip = x(this.start(to)) + 9;
      const bend = Math.min(60, Math.max(6, (tip - ax) / 2));
      for (const [style, wide] of [[theme.paper, 5], [colour, 2]]) {  // a rim, so that it shows on any colour
        c.strokeStyle = c.fillStyle = style;
        c.setLineDash(style === colour ? dash : []);
        c.lineWidth = wide;
        c.beginPath();
        c.moveTo(ax, ay);
        c.bezierCurveTo(ax + bend, ay, tip - 7 - bend, by, tip - 7, by);
        c.stroke();
        c.setLineDash([]);
        c.lineWidth = wide - 2;
        c.beginPath();
        c.moveTo(tip, by);
        c.lineTo(tip - 8, by - 5);
        c.lineTo(tip - 8, by + 5);
        c.closePath();
        c.moveTo(ax + 3, ay);
        c.arc(ax, ay, 3, 0, 2 * Math.PI);
        c.fill();
        if (style !== colour) c.stroke();
      }
    };
    for (const b of this.next[i].slice(0, 200)) arrow(i, b, theme.out, [5, 3]);
    for (const a of (this.tasks[i].after || []).slice(0, 200)) arrow(a, i, theme.into, []);
  }

  outline({ c, x, theme }, i, own) {
    const { y, h } = this.box(i), from = x(this.start(i)), wide = Math.max(3, x(this.end(i)) - from);
    c.setLineDash(own ? [] : [4, 3]);
    for (const [style, width] of [[theme.paper, 5], [theme.ink, 2.5]]) {
      c.strokeStyle = style;
      c.lineWidth = width;
      c.beginPath();
      c.roundRect(from - 1, y - 1, wide + 1, h + 2, 4);
      c.stroke();
    }
    c.setLineDash([]);
  }

  drawCurve({ c, left, width, view, scale, x, theme }, curve) {
    const { top, at, points, most } = curve, bottom = top + CURVE;
    if (!at.length) return;
    c.beginPath();
    c.moveTo(Math.max(left, x(at[0])), bottom);
    const step = 1 / scale;
    let last = 0;
    for (let i = Math.max(0, above(at, view.from) - 1); i < at.length && at[i] <= view.to; ) {
      const next = Math.max(i + 1, above(at, at[i] + step, i));
      let high = 0;
      for (let n = i; n < next; n++) high = Math.max(high, points[n][1]);
      const px = Math.max(left, x(at[i])), y = bottom - Math.max(0, high / most) * (CURVE - 2);
      c.lineTo(px, last || bottom);
      c.lineTo(px, y);
      last = bottom - Math.max(0, points[next - 1][1] / most) * (CURVE - 2);
      i = next;
    }
    const stop = Math.min(width, x(this.length));
    c.lineTo(stop, last || bottom);
    c.lineTo(stop, bottom);
    c.fillStyle = theme.curve;
    c.fill();
    c.strokeStyle = theme.curveLine;
    c.lineWidth = 1;
    c.stroke();
  }

  drawLanes(at) {
    const { c, left, theme, width } = at;
    c.fillStyle = theme.paper;
    c.fillRect(0, 0, left, this.height);
    c.strokeStyle = theme.line;
    c.lineWidth = 1;
    c.textAlign = "left";
    this.data.lanes.forEach((lane, n) => {
      const use = this.data.use[n], y = this.top[n], h = this.levels[n] > 1 ? this.levels[n] * LEVEL : ROW;
      c.beginPath();
      c.moveTo(0, y + h + GAP / 2 - 0.5);
      c.lineTo(width, y + h + GAP / 2 - 0.5);
      c.stroke();
      c.textBaseline = "middle";
      c.font = theme.bold;
      c.fillStyle = theme.ink;
      const room = Math.floor((left - 12) / 6.6);
      c.fillText(fitted(lane.name, room), 4, y + ROW / 2 - 6.5);
      c.font = theme.small;
      c.fillStyle = theme.soft;
      const share = this.length ? Math.round(100 * use.busy / (this.data.end - this.data.begin)) : 0;
      const extra = (lane.sms ? ` · ${lane.sms} SMs` : "") + (lane.priority ? ` · prio ${lane.priority}` : "");
      c.fillText(fitted(`${share}% busy${extra}`, Math.floor((left - 8) / 5.8)), 4, y + ROW / 2 + 7.5);
    });
    for (const curve of this.curves) {
      c.font = theme.small;
      c.textBaseline = "middle";
      c.fillStyle = theme.soft;
      const most = curve.unit === "fraction" && curve.most <= 1 ? "" : ` · ${amount(curve.most, curve.unit)}`;
      c.fillText(fitted(curve.name + most, Math.floor((left - 8) / 6)), 4, curve.top + CURVE / 2 + 1);
    }
  }
}

/* How many of the sorted numbers are not above `value`. */
function above(sorted, value, from = 0) {
  let low = from, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function gutter(width) { return Math.round(Math.max(84, Math.min(150, width * 0.16))); }

function fitted(text, room) { return text.length <= room ? text : room < 3 ? "" : text.slice(0, room - 1) + "…"; }

/* The whole name; if there is no room for it its end, which says more than its beginning; or the micro-batch. */
function shortened(task, room) {
  const [path] = task.name.split("["), parts = task.micro_batches ? `[${task.micro_batches}]` : "";
  const dot = path.lastIndexOf("."), last = Math.max(dot, path.lastIndexOf(":"));
  const ends = [task.name, task.name.slice(dot + 1), task.name.slice(last + 1)];
  return ends.find(end => end.length <= room) || (room >= 7 ? fitted(ends[2], room) : parts.length <= room ? parts : "");
}

function tick(range, count, unit) {
  const rough = range / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(n => n * power >= rough) * power;
  return unit === "steps" ? Math.max(1, step) : step;
}

/* A time with as many digits as `exact` needs; 4 of them if that is not given. */
function clock(value, unit, exact) {
  if (unit === "steps") return `${+value.toFixed(2)}` + (exact ? "" : Math.abs(value - 1) < 1e-9 ? " step" : " steps");
  const size = Math.max(Math.abs(value), exact || 0);
  const [by, name] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : size >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
  if (!value) return "0";
  const power = number => Math.floor(Math.log10(Math.abs(number) * by) + 1e-9);
  const digits = exact ? -power(exact) : 3 - power(value);
  return `${(value * by).toFixed(Math.max(0, Math.min(digits, 9)))} ${name}`;
}

function amount(value, unit) {
  if (unit === "fraction") return `${Math.round(value * 100)}%`;
  if (unit !== "bytes") return `${+value.toPrecision(3)}`;
  const power = value >= 1024 ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
  return `${+(value / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/* What one timeline saves against another, in words. */
function saved(one, base) {
  const less = base.length - one.length, share = base.length ? Math.abs(less) / base.length : 0;
  const unit = one.data.unit, time = clock(Math.abs(less) / one.data.scale, unit);
  if (share < 5e-5) return "as long";
  const percent = `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
  return less > 0 ? `${time} saved (${percent})` : `${time} longer (${percent})`;
}
