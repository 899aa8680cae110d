"use strict";
// The drawer with sampling settings. They are kept in this browser; an empty field leaves the setting to the server.

const SETTINGS_KEY = "homing-chat-settings";
const number = (name, label, hint, least, most, { is_open = false, is_whole = false } = {}) => ({ name, label, hint, least, most, is_open, is_whole });
const FIELDS = [
  number("temperature", "Temperature", "Higher values make the text more surprising; 0 always picks the likeliest token.", 0, 100),
  number("top_p", "Top p", "Picks from the likeliest tokens that together have this probability; 1 allows all.", 0, 1, { is_open: true }),
  number("top_k", "Top k", "Picks from this many of the likeliest tokens; 0 allows all.", 0, 2 ** 31 - 1, { is_whole: true }),
  number("min_p", "Min p", "Leaves out tokens with less than this share of the likeliest token's probability.", 0, 1),
  number("repetition_penalty", "Repetition penalty", "Values above 1 make every token that already occurred less likely.", 0, 100, { is_open: true }),
  number("presence_penalty", "Presence penalty", "Makes tokens less likely once they have occurred in the answer.", -2, 2),
  number("frequency_penalty", "Frequency penalty", "Makes tokens less likely each time they occur in the answer.", -2, 2),
  number("seed", "Seed", "The same seed and settings give the same text; empty means a new seed for each answer.", -Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER, { is_whole: true }),
  number("max_tokens", "Maximum tokens", "Ends an answer after this many tokens.", 1, 2 ** 31 - 1, { is_whole: true }),
];
const STOP = { name: "stop", label: "Stop strings", hint: "The answer ends before any of these: one per line, at most 16. Write \\n for a line break." };

// Return the problem with a text in a field, or "".
function problem_with(field, text) {
  if (!text.trim()) return "";
  if (field === STOP) {
    const stops = read_stops(text);
    if (stops.length > 16) return "Enter at most 16 lines.";
    return stops.some((stop) => stop.length > 1000) ? "Each line may have at most 1,000 characters." : "";
  }
  const value = Number(text), { least, most, is_open, is_whole } = field;
  const is_inside = value >= least && value <= most && !(is_open && value === least);
  if (is_inside && (!is_whole || Number.isInteger(value))) return "";
  const kind = is_whole ? "a whole number" : "a number";
  const span = most >= 2 ** 31 - 1 ? (least < 0 ? "" : ` of ${least} or more`) : is_open ? ` above ${least} and at most ${most}` : ` from ${least} to ${most}`;
  return `Enter ${kind}${span}.`;
}

const read_stops = (text) => text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));

class Settings {
  constructor(container) {
    this.texts = JSON.parse(browser_storage.getItem(SETTINGS_KEY) || "{}");
    this.inputs = new Map();
    for (const field of [...FIELDS, STOP]) container.append(this.row(field));
  }

  row(field) {
    const id = "set-" + field.name;
    const input = field === STOP ? el("textarea", { id, rows: "2" }) : el("input", { id, type: "text", inputmode: field.is_whole ? "numeric" : "decimal", autocomplete: "off" });
    const error = el("span", { class: "field-error", id: id + "-error", role: "alert" });
    input.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
    input.value = this.texts[field.name] || "";
    input.addEventListener("input", () => this.read(field, input, error));
    this.inputs.set(field, { input, error });
    this.read(field, input, error);
    const hint = el("span", { class: "hint", id: id + "-hint" }, field.hint);
    return el("div", { class: "field" }, el("label", { for: id }, field.label), input, error, hint);
  }

  read(field, input, error) {
    const problem = problem_with(field, input.value);
    error.textContent = problem;
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    if (problem) return;
    if (input.value.trim()) this.texts[field.name] = input.value;
    else delete this.texts[field.name];
    browser_storage.setItem(SETTINGS_KEY, JSON.stringify(this.texts));
  }

  // Show in each empty field what the server uses.
  show_defaults(model) {
    for (const [field, { input }] of this.inputs) {
      const value = model.defaults?.[field.name];
      input.placeholder = value === undefined ? (field === STOP ? "none" : field.name === "seed" ? "random" : "") : String(value);
    }
  }

  reset() {
    for (const [field, { input, error }] of this.inputs) {
      input.value = "";
      this.read(field, input, error);
    }
  }

  get num_set() {
    return Object.keys(this.texts).length;
  }

  // The first field with an invalid value, or undefined.
  get invalid() {
    return [...this.inputs.values()].find(({ error }) => error.textContent)?.input;
  }

  // The settings for a request.
  values() {
    const found = {};
    for (const [field, { input }] of this.inputs) {
      if (!input.value.trim()) continue;
      if (field === STOP) found.stop = read_stops(input.value);
      else found[field.name] = Number(input.value);
    }
    return found;
  }
}
