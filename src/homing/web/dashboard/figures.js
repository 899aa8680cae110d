"use strict";
// How numbers, states, commands and tables are shown. A value that is unknown is shown as a dash.

const NONE = "–";
const SETTINGS = "homing-dashboard-";  // prefix of the keys in browser_storage

const plain = (n) => String(Number(n.toPrecision(3)));
const short = (n) => {
  const size = Math.abs(n);
  return size >= 1e12 ? plain(n / 1e12) + "T" : size >= 1e9 ? plain(n / 1e9) + "B" : size >= 1e6 ? plain(n / 1e6) + "M"
    : size >= 1e3 ? plain(n / 1e3) + "k" : plain(n);
};
const figure = (n) => n === 0 ? "0" : Math.abs(n) >= 100 ? n.toFixed(0) : Math.abs(n) >= 1 ? n.toFixed(3) : n.toPrecision(3);
const dollars = (n) => "$" + (n >= 1 || n === 0 ? n.toFixed(2) : n.toFixed(n >= 0.01 ? 2 : 4));
const percent = (n) => plain(n * 100) + "%";
const bytes = (n) => n === 0 ? "0" : n >= 1e9 ? plain(n / 1e9) + " GB" : plain(n / 1e6) + " MB";
const whole = (n) => n.toLocaleString("en");
// For an axis: neighboring ticks differ by less than a cent where little was spent.
const dollar_tick = (n) => "$" + ((plain(n).split(".")[1] || "").length > 2 ? plain(n) : n.toFixed(2));
const rate = (n) => n === 0 || Math.abs(n) >= 1e-4 ? plain(n) : n.toExponential(1);
const duration = (s) => {
  const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "m"], [60, "m", 1, "s"]];
  const found = units.find(([size]) => s >= size);
  if (!found) return Math.max(0, Math.round(s)) + "s";
  const [size, name, part, part_name] = found, rest = Math.floor(s % size / part);
  return Math.floor(s / size) + name + (rest ? " " + rest + part_name : "");
};
const moment = (t) => new Date(t * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const is_known = (value) => value !== null && value !== undefined;
const shown = (value, format) => is_known(value) ? format(value) : NONE;

function stored(name, fallback) {
  try {
    return JSON.parse(browser_storage.getItem(SETTINGS + name)) ?? fallback;
  } catch {  // written by something else
    return fallback;
  }
}

const store = (name, value) => browser_storage.setItem(SETTINGS + name, JSON.stringify(value));

// Like replaceChildren, but keeps unchanged nodes, so that clicks, focus and selection survive. Event listeners on
// these nodes must therefore read what they need from their element.
function fill(parent, ...children) {
  const wanted = children.flat().filter((each) => is_known(each) && each !== "");
  wanted.forEach((child, at) => {
    const made = typeof child === "string" ? document.createTextNode(child) : child, old = parent.childNodes[at];
    if (!old) parent.append(made);
    else if (!is_made_like(old, made)) old.replaceWith(made);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function is_made_like(old, made) {
  if (old.nodeName !== made.nodeName || old.dataset?.key !== made.dataset?.key) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return true;
  }
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  fill(old, ...made.childNodes);
  return true;
}

// -- states --

const FAILED = ["failed", "unfinished"];
const is_failed = (run) => FAILED.includes(run.state);

function badge(run) {
  const kind = is_failed(run) ? "bad" : run.is_live ? "good live" : run.is_billing ? "warn live" : run.state === "done" ? "info" : "";
  return el("span", { class: "badge " + kind }, run.state);
}

// Why a run ended, as one or two sentences; "" for one that ended as planned.
function reason_of(run) {
  if (run.is_live || run.state === "done") return "";
  return run.reason || (run.state === "unfinished" ? "The trainer ended without an outcome." : "");
}

function model_of(run) {
  return [is_known(run.num_params) ? short(run.num_params) : "", run.base ? "open weights" : run.family || ""].filter(Boolean).join(" ") || NONE;
}

function where_of(run) {
  if (run.is_trained_here) return "this computer";
  return [run.provider, run.offer].filter(Boolean).join(", ") || NONE;
}

const most = (run) => run.is_at_most ? "at most " : "";

function money_of(run) {
  if (!is_known(run.spend_usd)) return NONE;
  const limit = is_known(run.spend_limit_usd) ? el("span", { class: "muted" }, " of " + dollars(run.spend_limit_usd)) : null;
  return el("span", {}, most(run) + dollars(run.spend_usd), limit, limit && meter(run.spend_usd / run.spend_limit_usd, "Spend compared with the limit"));
}

function meter(share, label) {
  const value = Math.round(100 * Math.min(1, share));
  return el("progress", { class: "bar" + (share >= .9 ? " full" : ""), max: 100, value, "aria-label": `${label}: ${value}%` });
}

// -- parts of pages --

// The command that ends everything, or the next one to type, with a copy button.
function command(text, why = "") {
  const button = el("button", { type: "button", class: "btn-small copy", "aria-label": "Copy: " + text }, "Copy");
  return el("div", { class: "command-row" }, why && el("span", { class: "why" }, why),
    el("div", { class: "command" }, el("code", {}, text), button));
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button.copy");
  if (!button) return;
  await copy_text(button.previousElementSibling.textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

const notes = (texts) => texts.filter(Boolean).map((text) => el("p", { class: "note" }, text));

// A table of [headers], [[cell]]; the columns named in `numbers` are aligned to the right.
function table(caption, headers, rows, numbers = []) {
  const kind = (at) => numbers.includes(at) ? "num" : null;
  return el("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": caption }, el("table", {},
    el("caption", { class: "visually-hidden" }, caption),
    el("thead", {}, el("tr", {}, ...headers.map((each, at) => el("th", { scope: "col", class: kind(at) }, each)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell, at) =>
      el(at ? "td" : "th", { class: kind(at), scope: at ? null : "row" }, is_known(cell) ? cell : NONE)))))));
}

function choice(id, label, options, value) {
  return el("label", { class: "choice", for: id }, el("span", {}, label),
    el("select", { id }, ...options.map(([each, text]) => el("option", { value: each, selected: each === value }, text))));
}

// Say a change to people who cannot see it.
function speak(text) { $("spoken").textContent = text; }
