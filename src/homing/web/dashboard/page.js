"use strict";
const $ = (id) => document.getElementById(id);
let token = "", stream = null, shown = null;
let silence_s = 30;  // three times the server's longest silence; after that, even an open connection counts as dead

// The token is in the URL fragment, which browsers do not send and servers do not log. Remove it from the URL at once.
function take_token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  sessionStorage.setItem("homing-dashboard-token", given);
  history.replaceState(null, "", location.pathname);
}

// Build an element from text, never from HTML: the text is untrusted.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined && each !== ""));
  return made;
}

// Like replaceChildren, but keeps unchanged nodes, so that clicks, focus and selection survive. Event listeners on
// these nodes must therefore read what they need from their element.
function fill(parent, ...children) {
  const wanted = children.filter((each) => each !== null && each !== undefined && each !== "");
  wanted.forEach((child, at) => {
    const made = typeof child === "string" ? document.createTextNode(child) : child, old = parent.childNodes[at];
    if (!old) parent.append(made);
    else if (!is_made_like(old, made)) old.replaceWith(made);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function is_made_like(old, made) {
  if (old.nodeName !== made.nodeName) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return true;
  }
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  fill(old, ...made.childNodes);
  return true;
}

function link(is_on, text) {
  $("link").className = is_on ? "on" : "off";
  $("link").textContent = text;
}

// --- the stream: everything first, then what is new ---

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await within(silence_s, reader.read(), () => reader.cancel());
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

// After the computer sleeps, or if the far end of a tunnel is gone, a connection delivers no data and never closes.
async function within(limit_s, promise, give_up) {
  let timer;
  const is_late = new Promise((_, fail) => { timer = setTimeout(() => fail(new Error("silence")), limit_s * 1000); });
  try {
    return await Promise.race([promise, is_late]);
  } catch (error) {
    give_up().catch(() => {});
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

async function follow(path, take, control) {
  for (let wait_s = 1; !control.signal.aborted; wait_s = Math.min(10, wait_s * 2)) {
    try {
      const response = await fetch(path, { headers: { Authorization: "Bearer " + token }, signal: control.signal });
      if (response.status === 401) return ask_token((await response.json()).error.message);
      if (!response.ok) {
        link(false, (await response.json()).error.message);
        return;
      }
      link(true, "live");
      wait_s = 0.5;
      for await (const part of events(response.body)) take(part);
    } catch (error) {
      if (control.signal.aborted) return;
    }
    link(false, "not connected: is homing dashboard still running?");
    await new Promise((done) => setTimeout(done, wait_s * 1000));
  }
}

function ask_token(refusal) {
  link(false, "not connected");
  for (const id of ["money", "all", "one"]) $(id).hidden = true;
  $("refusal").textContent = token ? refusal : "";
  $("login").hidden = false;
  $("token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("homing-dashboard-token", $("token").value.trim());
  open();
});

// --- all runs ---

function state_of(run) {
  const is_failed = ["failed", "unfinished", "forgotten"].includes(run.state);
  const kind = run.billing && run.billing !== "no" ? "bill" : run.is_live ? "live" : is_failed ? "fail" : "";
  return el("span", { class: "state " + kind }, run.state);
}

function command(text, why = "") {
  const copy = async (event) => {
    const button = event.currentTarget;
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return el("div", { class: "command" }, why && el("span", { class: "why" }, why), el("code", {}, text),
    el("button", { type: "button", onclick: copy }, "Copy"));
}

function notes(texts) {
  return texts.filter(Boolean).map((text) => el("p", { class: "note" }, text));
}

function show_money(money) {
  $("money").hidden = shown !== "";
  $("money").className = "card" + (money.is_billing ? " bills" : "");
  // Show the command that ends everything with a copy button, like the other commands.
  const [first, ...rest] = money.words.flatMap((text) => text.split(" End all: ")).map((text) =>
    text.startsWith("homing ") ? command(text, "End everything that is billing") : text);
  const spent = money.total ? el("span", { class: "soft" }, money.total + " in total so far (ledger)") : "";
  const others = money.others.map((each) => el("p", { class: "note" },
    [each.state, each.instance, each.spent, each.age, "billing " + each.billing].filter(Boolean).join(", ")));
  fill($("money"),
    el("div", { class: "row" }, el("span", { class: "big" }, first), spent),
    ...rest.map((each) => el("div", {}, each)),
    money.asked && el("div", { class: "soft small" }, "Providers queried at " + money.asked),
    money.left_out && el("div", { class: "soft small" }, money.left_out + " older ended runs are not shown: homing runs --all"),
    ...others, ...notes(money.problems));
  document.title = money.is_billing ? first : "homing";
  $("where").textContent = shown === "" ? money.home : "";
  if (money.is_empty) {
    fill($("all"), el("section", { class: "card" }, el("h2", {}, "No runs yet"),
      el("p", {}, "Nothing has been launched or trained with this homing home directory. Get started:"),
      command("homing quickstart", "The full workflow on this computer"),
      command("homing new first --from tiny", "Create your own run file")));
  }
}

function show_runs(runs) {
  if (!runs.length) return;
  fill($("all"), ...runs.map((run) => {
    const has_line = run.is_live && run.line;  // the line includes step and dollars
    const spent = run.spent && (run.limit ? run.spent + " of " + run.limit : run.spent);
    const told = has_line ? [] : [spent, run.step && "step " + run.step];
    const where = run.is_here ? "trained locally" : run.instance;
    return el("a", { class: "card run", href: "#run=" + encodeURIComponent(run.run) },
      el("span", {}, el("span", { class: "name" }, run.run), state_of(run)),
      el("span", { class: "right" }, told.filter(Boolean).join(" · ")),
      el("span", { class: "soft small" }, where || run.reason || ""),
      el("span", { class: "right soft small" }, run.age + " old"),
      has_line ? el("span", { class: "line" }, run.line) : "",
      run.share !== null && run.share !== undefined && run.is_live
        ? el("progress", { class: "bar", max: 1, value: run.share, title: "share of its spend limit that is spent" }) : "",
      ...notes([run.problem]));
  }));
}

const failures = {};
function show_failure(name, text) {
  failures[name] = text;
  const said = Object.values(failures).filter(Boolean);
  if (said.length) link(false, said.join(" "));
  else link(true, "live");
}

function take_all(part) {
  if (part.section === "money") show_money(part.value);
  else if (part.section === "runs") show_runs(part.value);
  else if (part.section.startsWith("failure")) show_failure(part.section, part.value);
}

// --- one run ---

let run = null;

function forget() {
  if (run) clear_charts();
  run = { head: null, phase: null, points: new Map(), events: [], samples: [], logs: {}, program: "trainer", charts: [] };
  for (const id of ["head", "problems", "next", "phases", "charts", "events", "samples", "programs", "log", "kept",
    "attempts", "rows"]) $(id).replaceChildren();
  $("receipt").hidden = true;
  $("phases").hidden = true;
  $("head").append(el("p", { class: "empty" }, "Loading. A remote store takes a moment."));
}

// A point: phase, step, t, then the values.
const LEARNED = 3, HELD_OUT = 4, SPEED = 5, MFU = 6, MEMORY = 7, DOLLARS = 9;

function add_points(points, is_new) {
  if (is_new) run.points = new Map();
  for (const point of points) {
    const own = run.points.get(point[0]) || [];
    run.points.set(point[0], own);
    const last = own[own.length - 1];
    // An evaluation has its own metric line, with the same step as the line before it.
    if (last && last[1] === point[1]) point.forEach((value, at) => { if (value !== null) last[at] = value; });
    else own.push(point.slice());
  }
  if (points.length && !run.is_picked) run.phase = points[points.length - 1][0];
  show_phases();
  draw();
}

function show_phases() {
  const phases = [...run.points.keys()];
  $("phases").hidden = phases.length < 2;
  fill($("phases"), ...phases.map((phase) => el("button", {
    type: "button", "aria-pressed": String(phase === run.phase),
    onclick: (event) => { run.phase = event.currentTarget.textContent; run.is_picked = true; show_phases(); draw(); },
  }, phase)));
}

const plain = (n) => String(Number(n.toPrecision(3)));
const short = (n) => n >= 1e9 ? plain(n / 1e9) + "B" : n >= 1e6 ? plain(n / 1e6) + "M" : n >= 1e3 ? plain(n / 1e3) + "k" : plain(n);
const figure = (n) => n === 0 ? "0" : Math.abs(n) >= 100 ? n.toFixed(0) : Math.abs(n) >= 1 ? n.toFixed(3) : n.toPrecision(3);
const dollars = (n) => "$" + (n >= 1 ? n.toFixed(2) : n.toFixed(4));
const CHARTS = [
  { name: "loss", of: [[LEARNED, "--blue"], [HELD_OUT, "--red"]], format: figure, tick: plain, is_wide: true },
  { name: "tokens per second", of: [[SPEED, "--blue"]], format: short, is_from_zero: true },
  { name: "mfu", of: [[MFU, "--blue"]], format: (n) => plain(n * 100) + "%", is_from_zero: true },
  { name: "GPU memory", of: [[MEMORY, "--blue"]], format: (n) => plain(n / 1e9) + " GB", is_from_zero: true },
  { name: "dollars", of: [[DOLLARS, "--blue"]], format: dollars, tick: (n) => "$" + plain(n), is_from_zero: true },
];

function clear_charts() {
  for (const chart of run.charts) {
    chart.observer.disconnect();
    chart.plot.destroy();
  }
  run.charts = [];
  run.drawn = null;
  $("charts").replaceChildren();
}

function draw() {
  const points = run.points.get(run.phase) || [];
  const wanted = CHARTS.filter((chart) => points.some((point) => point[chart.of[0][0]] !== null));
  if (!wanted.length) {
    clear_charts();
    $("charts").append(el("section", { class: "card wider" }, el("h2", {}, "Curves"),
      el("p", { class: "empty" }, yet("No metrics yet. They appear after the first steps.", "No metrics are recorded."))));
    return;
  }
  const key = run.phase + " " + wanted.map((chart) => chart.name).join();
  if (run.drawn !== key) {
    clear_charts();
    run.charts = wanted.map(make_chart);
    run.drawn = key;
  }
  for (const chart of run.charts) {
    chart.plot.setData([points.map((point) => point[1]), ...chart.spec.of.map(([at]) => points.map((p) => p[at]))]);
    chart.now.textContent = last_words(chart.spec, points);
  }
}

function last_words(spec, points) {
  return spec.of.map(([at], number) => {
    const last = points.findLast((point) => point[at] !== null);
    if (!last) return "";
    return (number ? "held-out " : "") + spec.format(last[at]);
  }).filter(Boolean).join("  ·  ");
}

function make_chart(spec) {
  const is_rl = run.phase === "rl";
  const name = spec.name === "loss" ? (is_rl ? "reward" : "loss in nats per token") : spec.name;
  const now = el("span", { class: "now" }), box = el("div", {});
  const card = el("section", { class: "card" + (spec.is_wide ? " wider" : "") }, el("h2", {}, name, now), box);
  $("charts").append(card);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // In rl the held-out value is the missing reward, which does not belong in a plot of rewards.
  const of = is_rl && spec.name === "loss" ? spec.of.slice(0, 1) : spec.of;
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth), height: spec.is_wide ? 260 : 180,
    padding: [10, 14, 0, 0], legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (u, low, high) => range_of(spec, low, high) } },
    series: [{}, ...of.map(([at, ink], number) => ({
      stroke: colour(ink), width: number ? 0 : 1.75, spanGaps: true,
      points: number ? { show: true, size: 7, fill: colour(ink), stroke: colour(ink) } : { show: false },
    }))],
    axes: [{ ...axis, size: 30, values: (u, ticks) => ticks.map((n) => Number.isInteger(n) ? short(n) : "") },
      { ...axis, size: 62, values: (u, ticks) => ticks.map((n) => n === null ? "" : (spec.tick || spec.format)(n)) }],
    hooks: { setCursor: [(u) => tell_at(u, { ...spec, of }, now)] },
  }, [[], ...of.map(() => [])], box);
  const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth), height: plot.height }));
  observer.observe(card);
  return { spec: { ...spec, of }, plot, now, observer };
}

function range_of(spec, low, high) {
  if (low === null) return [0, 1];
  if (spec.is_from_zero) return [0, high > 0 ? high * 1.1 : 1];
  const around = (high - low) * .06 || Math.abs(high) * .05 || 1;
  return [low - around, high + around];
}

function tell_at(plot, spec, now) {
  const at = plot.cursor.idx, points = run.points.get(run.phase) || [];
  if (at === null || at === undefined || !points[at]) {
    now.textContent = last_words(spec, points);
    return;
  }
  const said = spec.of.map(([column], number) => points[at][column] === null ? ""
    : (number ? "held-out " : "") + spec.format(points[at][column]));
  now.textContent = ["step " + points[at][1].toLocaleString("en"), ...said.filter(Boolean)].join("  ·  ");
}

// A run that has ended gets no more data, so say so.
const yet = (while_live, after) => run.head && !run.head.is_live ? after : while_live;

function show_head(head) {
  const is_other = !run.head || run.head.is_live !== head.is_live;
  run.head = head;
  if (is_other) for (const show of [draw, show_events, show_samples, show_log]) show();
  const said = head.reason ? head.reason : "";
  const here = head.is_trained_here ? "Trained on this computer; nothing is billing." : "";
  fill($("head"),
    el("h1", {}, head.run, state_of({ ...head, billing: head.is_billing ? "yes" : "no" })),
    el("div", { class: "line" }, head.line),
    said || here ? el("div", { class: "soft small" }, [said, here].filter(Boolean).join(" ")) : "");
  $("where").textContent = "";
  document.title = (head.line.split(" | ").slice(0, 2).join(", ") || head.state) + " · " + head.name;
}

function show_next(next) {
  fill($("next"), el("h2", {}, "Next commands to run in a terminal"),
    ...next.map((each) => command(each.command, each.why)));
}

function clock(t) {
  return t ? new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : "";
}

function show_events() {
  const told = run.events.toReversed().map((event) => el("div", { class: "event " + event.kind },
    el("span", { class: "soft", title: event.t ? new Date(event.t * 1000).toLocaleString() : "" }, clock(event.t)),
    el("span", {}, event.text)));
  fill($("events"), ...(told.length ? told : [el("p", { class: "empty" }, yet("No events yet.", "No events are recorded."))]));
}

function show_samples() {
  const told = run.samples.toReversed().map((sample) => el("div", { class: "sample" },
    el("b", {}, sample.name.replace(/\.txt$/, "").replace(/-0*(\d+)$/, " step $1")), sample.text));
  fill($("samples"), ...(told.length ? told
    : [el("p", { class: "empty" }, yet("None yet. The trainer writes samples from time to time.", "No samples are recorded."))]));
}

function show_log() {
  const programs = Object.keys(run.logs), box = $("log");
  $("programs").hidden = programs.length < 2;
  fill($("programs"), ...programs.map((program) => el("button", {
    type: "button", "aria-pressed": String(program === run.program),
    onclick: (event) => { run.program = event.currentTarget.textContent; show_log(); },
  }, program)));
  const is_at_end = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const lines = run.logs[run.program] || [];
  box.textContent = lines.length ? lines.join("\n") : yet("Nothing yet.", "No log is recorded.");
  if (is_at_end) box.scrollTop = box.scrollHeight;
}

function table(headers, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...headers.map((each) => el("th", {}, each)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell, at) =>
      el("td", { class: at ? "num" : "" }, cell === null ? "" : String(cell)))))));
}

function show_report(report) {
  const size = (n) => n >= 1e9 ? (n / 1e9).toFixed(2) + " GB" : (n / 1e6).toFixed(1) + " MB";
  fill($("kept"), report.kept.length
    ? table(["where", "step", "", "held-out", "size"], report.kept.map((each) => [each.where,
        each.phase + " " + each.step.toLocaleString("en"), each.problem || each.called.join(", "),
        each.val_loss === null ? "" : figure(each.val_loss), size(each.num_bytes)]))
    : el("p", { class: "empty" }, yet("None yet. A checkpoint appears once it is complete.", "None found.")));
  $("receipt").hidden = !report.attempts.length;
  const moment = (t) => t ? new Date(t * 1000).toLocaleString() : "";
  fill($("attempts"), table(["attempt", "offer", "rate", "dollars", "from", "until", "billing"],
    report.attempts.map((each) => [each.number, each.provider + " " + each.offer, "$" + each.rate_usd_per_hour + "/h",
      (each.is_at_most ? "at most " : "") + dollars(Number(each.spend_usd)), moment(each.began_at), moment(each.ended_at),
      each.billing])));
}

function take_one(part) {
  const name = part.section;
  if (name === "head") show_head(part.value);
  else if (name === "problems") fill($("problems"), ...notes(part.value));
  else if (name === "next") show_next(part.value);
  else if (name === "rows") fill($("rows"), ...part.value.flatMap(([label, text]) => [el("dt", {}, label), el("dd", {}, text)]));
  else if (name === "report") show_report(part.value);
  else if (name === "points") add_points(part.items, part.is_new);
  else if (name === "events") { run.events = part.is_new ? part.items : run.events.concat(part.items); show_events(); }
  else if (name === "samples") { run.samples = part.is_new ? part.items : run.samples.concat(part.items); show_samples(); }
  else if (name.startsWith("log ")) {
    const program = name.slice(4), before = part.is_new ? [] : run.logs[program] || [];
    run.logs[program] = before.concat(part.items).slice(-400);
    show_log();
  }
}

// --- choosing between the list and one run ---

function open() {
  take_token();
  token = sessionStorage.getItem("homing-dashboard-token") || "";
  const wanted = new URLSearchParams(location.hash.slice(1)).get("run") || "";
  if (stream) stream.abort();
  stream = new AbortController();
  shown = wanted;
  $("login").hidden = true;
  if (!token) return ask_token("");
  // With such a header, fetch would throw an error, even after a reload.
  if (!/^[\x21-\x7e]+$/.test(token)) return ask_token("The token has invalid characters.");
  $("all").hidden = wanted !== "";
  $("money").hidden = true;
  $("one").hidden = wanted === "";
  $("home").textContent = wanted ? "← all runs" : "homing";
  if (wanted) {
    forget();
    show_events();
    show_samples();
    draw();
    follow("api/runs/" + encodeURIComponent(wanted) + "/live", take_one, stream);
  } else {
    document.title = "homing";
    follow("api/runs/live", take_all, stream);
  }
}

addEventListener("hashchange", open);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (run) { run.drawn = null; draw(); } });
open();
