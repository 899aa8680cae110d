"use strict";
// One chart for one or several runs: raw and smoothed curves, axes, a tooltip, marks, and a table with the same data.

const CHARTS = [
  { key: "loss", title: "Training loss", unit: "nats per token", of: ["loss"], show: figure },
  { key: "val_loss", title: "Validation loss", unit: "nats per token", of: ["val_loss"], show: figure, is_sparse: true },
  { key: "val_bits_per_byte", title: "Bits per byte", unit: "validation", of: ["val_bits_per_byte"], show: figure, is_sparse: true },
  { key: "reward", title: "Reward", unit: "mean of a step", of: ["reward"], show: figure },
  { key: "val_reward", title: "Validation reward", unit: "mean", of: ["val_reward"], show: figure, is_sparse: true },
  { key: "length", title: "Answer length", unit: "tokens", of: ["length"], show: figure, is_from_zero: true },
  { key: "lr", title: "Learning rate", unit: "", of: ["lr"], show: rate, is_from_zero: true, is_exact: true },
  { key: "grad_norm", title: "Gradient norm", unit: "before clipping", of: ["grad_norm"], show: figure },
  { key: "tokens_per_s", title: "Tokens per second", unit: "", of: ["tokens_per_s"], show: short, is_from_zero: true },
  { key: "mfu", title: "MFU", unit: "model FLOP/s utilization", of: ["mfu"], show: percent, is_from_zero: true },
  { key: "memory_bytes", title: "GPU memory", unit: "peak of the trainer", of: ["memory_bytes"], show: bytes, is_from_zero: true, is_exact: true },
  { key: "spend_usd", title: "Dollars", unit: "spent", of: ["spend_usd"], show: dollars, tick: dollar_tick, is_from_zero: true, is_exact: true },
];
// Training and validation share an axis where only one run is shown.
const LOSSES = { key: "losses", title: "Loss", unit: "nats per token", of: ["loss", "val_loss"], show: figure, is_wide: true };
const NAMES = { loss: "training", val_loss: "validation" };
const AXES = {
  step: { name: "Step", show: (n) => short(n), tell: (n) => "step " + whole(Math.round(n)) },
  tokens: { name: "Tokens", show: short, tell: (n) => short(n) + " tokens" },
  time: { name: "Time", show: duration, tell: (n) => duration(n) + " after the start" },
  usd: { name: "Dollars", show: dollar_tick, tell: (n) => dollars(n) },
};
const NUM_COLORS = 8;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ink = (number) => css(`--series-${number % NUM_COLORS + 1}`);

// The points of one run as arrays. Each phase counts its steps and tokens from zero, so add those of earlier phases.
class Curve {
  constructor() { this.columns = []; this.points = []; this.phases = []; }

  add(points, is_new) {
    if (is_new) this.points = [];
    const at = Object.fromEntries(this.columns.map((name, number) => [name, number]));
    for (const point of points) {
      const last = this.points[this.points.length - 1];
      // An evaluation has its own line, with the same step as the line before it.
      if (last && last[at.phase] === point[at.phase] && last[at.step] === point[at.step]) {
        point.forEach((value, number) => { if (value !== null && number !== at.t) last[number] = value; });
      } else {
        this.points.push(point.slice());
      }
    }
    this._arrange(at);
  }

  _arrange(at) {
    const of = (name) => this.points.map((point) => at[name] === undefined ? null : point[at[name]]);
    const began = this.points.length ? this.points[0][at.t] : 0;
    this.values = Object.fromEntries(this.columns.map((name) => [name, of(name)]));
    this.x = { step: [], tokens: [], time: of("t").map((t) => t - began), usd: of("spend_usd") };
    this.phases = [];
    let steps = 0, tokens = 0, last = null;
    for (const point of this.points) {
      if (!last || last[at.phase] !== point[at.phase]) {
        if (last) { steps += last[at.step]; tokens += last[at.num_tokens] || 0; }
        this.phases.push({ name: point[at.phase], at: this.x.step.length, steps });
      }
      this.x.step.push(steps + point[at.step]);
      this.x.tokens.push(tokens + (point[at.num_tokens] || 0));
      last = point;
    }
  }

  has(name) { return (this.values?.[name] || []).some(is_known); }

  // The known values of a column over an axis, in ascending order, of one phase or of all.
  series(name, axis, phase = "") {
    const xs = [], ys = [], x = this.x?.[axis] || [], y = this.values?.[name] || [], of = this.values?.phase || [];
    for (let i = 0; i < x.length; i++) {
      if (!is_known(y[i]) || !is_known(x[i]) || (phase && of[i] !== phase)) continue;
      if (xs.length && x[i] < xs[xs.length - 1]) continue;  // the clock of the machine was set back
      xs.push(x[i]);
      ys.push(y[i]);
    }
    return [xs, ys];
  }

  // Where an event that names a phase and a step, or only a time, lies on an axis.
  place(event, axis) {
    const { phase, t } = this.values || {};
    if (!t || !t.length) return null;
    let found = -1;
    const own = this.phases.find((each) => each.name === event.phase);
    if (own && is_known(event.step)) {
      for (let i = own.at; i < t.length && phase[i] === own.name; i++) { found = i; if (this.x.step[i] - own.steps >= event.step) break; }
    } else {
      found = t.findIndex((each) => each >= event.t);
    }
    return found < 0 ? null : this.x[axis][found];
  }
}

// Exponential moving average, corrected for its start, so that the first values are not pulled towards zero.
function smooth(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

class Chart {
  // `host.lines()`: [{ run, name, curve, color, is_off }]; `host.view`: { x, is_log, smoothing, phase }; `host.marks(axis)`
  constructor(spec, host) {
    this.spec = spec;
    this.host = host;
    this.now = el("span", { class: "now num" });
    this.box = el("div", { class: "plot", tabindex: 0, role: "img" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.data = el("div", {});
    this.more = el("details", { class: "data" }, el("summary", {}, "Data table: " + spec.title), this.data);
    this.card = el("section", { class: "card chart" + (spec.is_wide ? " wide" : "") },
      el("div", { class: "chart-head" }, el("h3", {}, spec.title, spec.unit && el("span", { class: "muted unit" }, spec.unit)), this.now),
      el("div", { class: "plot-wrap" }, this.box, this.tip), this.more);
    this.box.addEventListener("keydown", (event) => this._step(event));
    this.box.addEventListener("blur", () => { this.tip.hidden = true; });
    this.more.addEventListener("toggle", () => this._fill_table());
    this.observer = new ResizeObserver(() => this.plot?.setSize(this._size()));
    this.observer.observe(this.box);
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.card.remove();
  }

  _size() { return { width: Math.max(160, this.box.clientWidth), height: this.spec.is_wide ? 270 : 190 }; }

  // Each drawn series, with its own points: what the tooltip and the table tell.
  _series() {
    const { x, phase, smoothing, is_log } = this.host.view, found = [];
    for (const line of this.host.lines()) {
      this.spec.of.forEach((name, number) => {
        if (line.is_off || !line.curve.has(name)) return;
        let [xs, ys] = line.curve.series(name, x, phase);
        if (is_log) {
          const kept = ys.map((y) => y > 0);
          [xs, ys] = [xs.filter((_, i) => kept[i]), ys.filter((_, i) => kept[i])];
        }
        const is_dots = number > 0 || this.spec.is_sparse;
        const is_smooth = smoothing > 0 && !is_dots && !this.spec.is_exact;
        found.push({ line, name, xs, ys, is_dots, smooth: is_smooth ? smooth(ys, smoothing) : null,
          color: line.color + number, label: this.spec.of.length > 1 ? NAMES[name] : line.name });
      });
    }
    return found;
  }

  draw() {
    this.series = this._series();
    const has_data = this.series.some((each) => each.xs.length);
    this.card.hidden = !has_data;
    if (!has_data) return;
    const layout = JSON.stringify([this.series.map((e) => [e.line.run, e.name, e.color, !!e.smooth]), this.host.view.x, this.host.view.is_log, is_dark()]);
    const tables = this.series.map((each) => each.smooth ? [each.xs, each.ys, each.smooth] : [each.xs, each.ys]);
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    if (this.layout !== layout) {
      this.plot?.destroy();
      this.plot = new uPlot(this._options(), data, this.box);
      this.layout = layout;
    } else {
      this.plot.setData(data);
    }
    this._tell();
  }

  _options() {
    const { x, is_log } = this.host.view, tick = this.spec.tick || (this.spec.show === figure ? plain : this.spec.show);
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: `12px ${css("--sans")}` };
    const lines = this.series.flatMap((each) => {
      const color = ink(each.color);
      const raw = { stroke: each.smooth ? color + "40" : color, width: each.smooth ? 1 : 1.75, spanGaps: true,
        points: { show: each.is_dots, size: 5, fill: color, stroke: color } };
      return each.smooth ? [raw, { stroke: color, width: 2, spanGaps: true, points: { show: false } }] : [raw];
    });
    return {
      ...this._size(), padding: [12, 16, 0, 0], legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: is_log ? { distr: 3, range: (u, low, high) => low > 0 ? uPlot.rangeLog(low, high, 10, false) : [1, 10] } : { range: (u, low, high) => this._range(low, high) } },
      series: [{}, ...lines],
      axes: [
        { ...axis, size: 30, values: (u, ticks) => ticks.map((n) => x === "step" && !Number.isInteger(n) ? "" : AXES[x].show(n)) },
        { ...axis, size: 58, values: (u, ticks) => ticks.map((n) => n === null ? "" : tick(n)) },
      ],
      hooks: { setCursor: [(u) => this._point_at(u)], draw: [(u) => this._draw_marks(u)] },
    };
  }

  _range(low, high) {
    if (low === null) return [0, 1];
    if (this.spec.is_from_zero) return [0, high > 0 ? high * 1.1 : 1];
    const around = (high - low) * .06 || Math.abs(high) * .05 || 1;
    return [low - around, high + around];
  }

  _draw_marks(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * ratio}px ${css("--sans")}`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    const found = [];  // what happened at nearly the same place shares a line and a label
    for (const mark of this.host.marks(this.host.view.x)) {
      const known = found.find((each) => !each.is_phase === !mark.is_phase && Math.abs(u.valToPos(each.x, "x") - u.valToPos(mark.x, "x")) < 8);
      if (!known) found.push({ ...mark });
      else if (!known.name.split(", ").includes(mark.name)) known.name += ", " + mark.name;
    }
    for (const mark of found) {
      const at = Math.round(u.valToPos(mark.x, "x", true));
      if (at < left || at > left + width) continue;
      ctx.strokeStyle = ctx.fillStyle = css(mark.is_phase ? "--muted" : "--warn");
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
      ctx.stroke();
      if (this.spec.is_wide || mark.is_phase) ctx.fillText(mark.name, at + 4 * ratio, top + (mark.is_phase ? 10 : 24) * ratio);
    }
    ctx.restore();
  }

  _value(each, at) {
    const raw = this.spec.show(each.ys[at]);
    return each.smooth ? `${this.spec.show(each.smooth[at])} (raw ${raw})` : raw;
  }

  _point_at(u) {
    const { left, top } = u.cursor;
    if (!(left >= 0)) { this.tip.hidden = true; return; }
    const x = u.posToVal(left, "x");
    const rows = this.series.map((each) => ({ each, at: nearest(each.xs, x) }))
      .filter(({ each, at }) => at >= 0 && x <= each.xs[each.xs.length - 1] + (u.scales.x.max - u.scales.x.min) * .02);
    if (!rows.length) { this.tip.hidden = true; return; }
    const head = rows.length === 1 || this.spec.of.length > 1 ? rows[0].each.xs[rows[0].at] : x;
    this.told = [AXES[this.host.view.x].tell(head), ...rows.map(({ each, at }) => `${each.label}: ${this._value(each, at)}`)];
    fill(this.tip, el("b", {}, this.told[0]), ...rows.map(({ each, at }) => {
      const swatch = el("span", { class: `swatch s${each.color % NUM_COLORS}` });
      return el("div", {}, swatch, el("span", { class: "label" }, each.label), el("span", { class: "num" }, this._value(each, at)));
    }));
    this.tip.hidden = false;
    const room = this.box.clientWidth - this.tip.offsetWidth - 12, over = u.over.offsetLeft + left + 14;
    this.tip.style.left = (over > room ? Math.max(0, over - this.tip.offsetWidth - 28) : over) + "px";
    this.tip.style.top = Math.max(0, Math.min(top, 60)) + "px";
  }

  // The arrow keys move along the curve and speak its values.
  _step(event) {
    const xs = this.plot?.data[0] || [], far = Math.max(1, Math.round(xs.length / 40));
    const moves = { ArrowRight: far, ArrowLeft: -far, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.tip.hidden = true;
    if (!(event.key in moves) || !xs.length) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(xs.length - 1, (this.at ?? (event.key === "ArrowLeft" ? xs.length : -1)) + moves[event.key]));
    this.plot.setCursor({ left: this.plot.valToPos(xs[this.at], "x"), top: 20 });
    speak(this.told.join(", "));
  }

  _tell() {
    const last = this.series.filter((each) => each.ys.length).map((each) => `${each.label} ${this.spec.show(each.ys[each.ys.length - 1])}`);
    const is_one = this.host.lines().length === 1;
    fill(this.now, ...(is_one ? this.series.filter((each) => each.ys.length).flatMap((each, number) => {
      const text = this.spec.show(each.ys[each.ys.length - 1]);
      if (this.spec.of.length === 1) return [text];
      return [number ? "  ·  " : "", el("span", { class: `swatch s${each.color % NUM_COLORS}` }), `${NAMES[each.name]} ${text}`];
    }) : []));
    this.box.setAttribute("aria-label", `${this.spec.title}. Last: ${last.join("; ")}. The arrow keys read the values.`);
    this._fill_table();
  }

  _fill_table() {
    if (!this.more.open) return;
    const rows = this.series.filter((each) => each.ys.length).map((each) => {
      const low = each.ys.reduce((a, b) => Math.min(a, b)), high = each.ys.reduce((a, b) => Math.max(a, b)), at = each.xs[each.ys.indexOf(low)];
      return [this.spec.of.length > 1 ? NAMES[each.name] : each.line.name, whole(each.ys.length), this.spec.show(each.ys[0]),
        this.spec.show(each.ys[each.ys.length - 1]), this.spec.show(low), AXES[this.host.view.x].show(at), this.spec.show(high)];
    });
    fill(this.data, table(this.spec.title, ["Curve", "Points", "First", "Last", "Lowest", "Lowest at", "Highest"], rows, [1, 2, 3, 4, 5, 6]));
  }
}

// -- the charts of a page, and what they have in common --

const VIEW = { x: "step", is_log: false, smoothing: 0, phase: "" };

class Board {
  constructor(specs, host) {
    this.host = host;
    this.grid = el("div", { class: "charts" });
    this.empty = el("p", { class: "empty card" });
    this.charts = specs.map((spec) => new Chart(spec, host));
    this.grid.append(...this.charts.map((chart) => chart.card));
    this.controls = el("div", { class: "controls", role: "group", "aria-label": "How the charts are drawn" });
    this.controls.addEventListener("click", (event) => this._clicked(event));
    this.controls.addEventListener("input", (event) => this._changed(event));
    this.show_controls();
  }

  destroy() { this.charts.forEach((chart) => chart.destroy()); cancelAnimationFrame(this.frame); }

  // At most once for each frame, however many parts arrive.
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      for (const chart of this.charts) chart.draw();
      this.empty.textContent = this.host.nothing();
      this.empty.hidden = this.charts.some((chart) => !chart.card.hidden);
    });
  }

  show_controls() {
    const { x, is_log, smoothing } = this.host.view;
    const button = (group, value, text, is_on) => el("button", { type: "button", class: "btn-small", "data-set": group, "data-value": value, "aria-pressed": String(is_on) }, text);
    const phases = this.host.phases();
    fill(this.controls,
      el("div", { class: "segment", role: "group", "aria-label": "Horizontal axis" }, ...Object.entries(AXES).map(([each, { name }]) => button("x", each, name, each === x))),
      el("div", { class: "segment", role: "group", "aria-label": "Vertical axis" }, button("y", "linear", "Linear", !is_log), button("y", "log", "Log", is_log)),
      el("label", { class: "choice", for: "smoothing" }, el("span", {}, "Smoothing"),
        el("input", { type: "range", id: "smoothing", min: 0, max: .99, step: .01, value: smoothing, "aria-valuetext": String(smoothing) }),
        el("output", { class: "num", for: "smoothing" }, smoothing.toFixed(2))),
      phases.length > 1 ? choice("phase", "Phase", [["", "All phases"], ...phases.map((each) => [each, each])], this.host.view.phase) : null);
    const slider = this.controls.querySelector("#smoothing");
    if (document.activeElement !== slider) slider.value = smoothing;
  }

  _clicked(event) {
    const button = event.target.closest("[data-set]");
    if (!button) return;
    const { set, value } = button.dataset;
    this._set(set === "x" ? { x: value } : { is_log: value === "log" });
  }

  _changed(event) {
    if (event.target.id === "smoothing") this._set({ smoothing: Number(event.target.value) });
    if (event.target.id === "phase") this._set({ phase: event.target.value });
  }

  _set(changes) {
    Object.assign(this.host.view, changes);
    const { x, is_log, smoothing } = this.host.view;
    store("view", { x, is_log, smoothing });
    this.host.changed();
    this.show_controls();
    this.draw();
  }
}
