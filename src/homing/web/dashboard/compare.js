"use strict";
// Several runs in the same charts: legend, final figures, and what differs in their settings. The address holds it all.

// A run keeps its color: as long as the page remembers it, and whatever else is compared.
function colors_of(runs) {
  const known = stored("colors", {}), used = new Set(runs.filter((run) => run in known).map((run) => known[run]));
  const taken = new Set();
  const found = runs.map((run) => {
    let color = known[run];
    if (color === undefined || taken.has(color)) color = [...Array(NUM_COLORS).keys()].find((each) => !used.has(each) && !taken.has(each)) ?? taken.size % NUM_COLORS;
    taken.add(color);
    return [run, color];
  });
  store("colors", { ...Object.fromEntries(Object.entries(known).slice(-200)), ...Object.fromEntries(found) });
  return new Map(found);
}

// Every value of a document under its path: {"model.width": 768}.
function flatten(value, path = "", found = new Map()) {
  if (value !== null && typeof value === "object" && (Array.isArray(value) ? value.some((each) => typeof each === "object") : Object.keys(value).length)) {
    for (const [key, each] of Object.entries(value)) flatten(each, path ? `${path}.${key}` : key, found);
  } else {
    found.set(path, typeof value === "string" && value ? value : JSON.stringify(value));
  }
  return found;
}

// Where the values came from and what only names the run are not settings.
const settings_of = (config) => {
  const { origin, schema, id, name, store, run_file_sha256, ...settings } = config || {};
  return flatten(settings);
};

const comparison = {
  view: null, runs: new Map(), off: new Set(), board: null, only_differing: true, text: "",

  open(wanted, options) {
    this.close();
    this.view = { ...VIEW, ...stored("view", {}), phase: "" };
    if (options.get("x") in AXES) this.view.x = options.get("x");
    if (options.has("log")) this.view.is_log = options.get("log") === "1";
    if (options.has("smooth")) this.view.smoothing = Math.max(0, Math.min(.99, Number(options.get("smooth")) || 0));
    this.off = new Set((options.get("off") || "").split(",").filter(Boolean));
    const colors = colors_of(wanted);
    this.runs = new Map(wanted.map((run) => [run, { run, name: run, color: colors.get(run), curve: new Curve(), head: null, config: undefined }]));
    const host = {
      view: this.view, lines: () => [...this.runs.values()].map((each) => ({ ...each, is_off: this.off.has(each.run) })),
      phases: () => [...new Set([...this.runs.values()].flatMap((each) => each.curve.phases.map((phase) => phase.name)))],
      marks: () => [], changed: () => this.remember(),
      nothing: () => this.view.x === "usd" ? "None of these runs has dollars: they were trained on this computer." : "No metrics yet.",
    };
    this.board = new Board(CHARTS, host);
    $("compare").replaceChildren(
      el("div", { class: "title-row" }, el("h1", {}, `Compare ${wanted.length} runs`), el("span", { class: "spacer" }),
        el("button", { type: "button", id: "copy-address", onclick: () => this.copy_address() }, "Copy link")),
      el("div", { id: "compare-problems" }),
      el("div", { class: "legend", id: "legend", role: "group", "aria-label": "Runs in the charts" }),
      this.board.controls, this.board.empty, this.board.grid,
      el("section", { class: "card" }, el("h2", {}, "Final figures"), el("div", { id: "finals" })),
      el("section", { class: "card" }, el("div", { class: "title-row" }, el("h2", {}, "Settings"), el("span", { class: "spacer" }),
        el("label", { class: "check" }, el("input", { type: "checkbox", id: "differing", checked: this.only_differing }), "Only what differs"),
        el("input", { type: "search", id: "find-setting", placeholder: "Filter settings", "aria-label": "Filter settings" })),
        el("div", { id: "differences" })));
    $("legend").addEventListener("click", (event) => this.toggle(event.target.closest("button")));
    $("differing").addEventListener("change", (event) => { this.only_differing = event.target.checked; this.show_settings(); });
    $("find-setting").addEventListener("input", (event) => { this.text = event.target.value.trim().toLowerCase(); this.show_settings(); });
    this.text = "";
    this.show();
    document.title = `Compare ${wanted.length} runs · homing`;
    return "api/compare/live?" + wanted.map((run) => "run=" + encodeURIComponent(run)).join("&");
  },

  close() {
    this.board?.destroy();
    this.board = null;
    $("compare").replaceChildren();
  },

  // The address of what is shown, to be kept or sent to oneself. It does not add a step to the history.
  remember() {
    const parts = ["compare=" + [...this.runs.keys()].map(encodeURIComponent).join(","), "x=" + this.view.x];
    if (this.view.is_log) parts.push("log=1");
    if (this.view.smoothing) parts.push("smooth=" + this.view.smoothing);
    if (this.off.size) parts.push("off=" + [...this.off].map(encodeURIComponent).join(","));
    history.replaceState(null, "", "#" + parts.join("&"));
  },

  async copy_address() {
    this.remember();
    await copy_text(location.href);
    toast("The link to this comparison is copied. It opens on this computer while the dashboard runs.");
  },

  toggle(button) {
    if (!button) return;
    if (!this.off.delete(button.dataset.run)) this.off.add(button.dataset.run);
    this.remember();
    this.show();
  },

  take(part) {
    const own = this.runs.get(part.run);
    if (!own) return;
    if (part.section === "head") {
      own.head = part.value;
      const known = [...this.runs.values()].filter((each) => each.head);
      for (const { head, run } of known) {  // a later head may share the name of an earlier one: then both show their ids
        this.runs.get(run).name = known.filter((each) => each.head.name === head.name).length > 1 ? run : head.name;
      }
    } else if (part.section === "config") own.config = part.value;
    else if (part.section === "point_columns") own.curve.columns = part.value;
    else if (part.section === "points") own.curve.add(part.items, part.is_new);
    else if (part.section === "problems") { own.problems = part.value; fill($("compare-problems"), notes([...this.runs.values()].flatMap((each) => each.problems || []))); }
    this.is_late = this.is_late || setTimeout(() => { this.is_late = 0; if (this.board) this.show(); }, 50);
  },

  show() {
    fill($("legend"), [...this.runs.values()].map((each) => el("button", {
      type: "button", class: "btn-small", "data-run": each.run, "aria-pressed": String(!this.off.has(each.run)) },
    el("span", { class: `swatch s${each.color}` }), each.name)));
    this.board.show_controls();
    this.board.draw();
    this.show_finals();
    this.show_settings();
  },

  show_finals() {
    const columns = [["State", (run) => badge(run)], ["Model", model_of], ["Step", step_of], ["Train loss", (run) => shown(run.loss, figure)],
      ["Val. loss", (run) => shown(run.val_loss, figure)], ["Bits/byte", (run) => shown(run.val_bits_per_byte, figure)],
      ["Reward", (run) => shown(run.reward, figure)], ["Phase tokens", (run) => shown(run.num_tokens, short)],
      ["Tokens/s", (run) => shown(run.tokens_per_s, short)], ["Dollars", money_of], ["Duration", (run) => shown(run.duration_s, duration)]];
    const rows = [...this.runs.values()].map((each) => [
      el("span", {}, el("span", { class: `swatch s${each.color}` }), el("a", { href: "#run=" + encodeURIComponent(each.run) }, each.name)),
      ...columns.map(([, show]) => each.head ? show(each.head) : NONE)]);
    fill($("finals"), table("Final figures", ["Run", ...columns.map(([label]) => label)], rows, [3, 4, 5, 6, 7, 8, 9, 10, 11]));
  },

  show_settings() {
    const runs = [...this.runs.values()], all = runs.map((each) => settings_of(each.config));
    const keys = [...new Set(all.flatMap((each) => [...each.keys()]))].sort();
    // Of a phase that a run does not have, only the absence is a difference, and not each of its settings.
    const has = (each, key) => { const phase = key.match(/^phases\.\d+/); return !phase || key === phase[0] + ".kind" || each.has(phase[0] + ".kind"); };
    const differs = (key) => new Set(all.filter((each) => each.size && has(each, key)).map((each) => each.get(key))).size > 1;
    const wanted = keys.filter((key) => (!this.only_differing || differs(key))
      && (!this.text || key.toLowerCase().includes(this.text) || all.some((each) => (each.get(key) || "").toLowerCase().includes(this.text))));
    if (!wanted.length) { fill($("differences"), el("p", { class: "empty" }, runs.some((each) => each.config) ? "No setting differs or matches." : "The settings are not known yet.")); return; }
    const rows = wanted.map((key) => [el("code", {}, key), ...all.map((each) => el("code", { class: differs(key) ? "differs" : "" }, each.get(key) ?? NONE))]);
    fill($("differences"), table("Settings", ["Setting", ...runs.map((each) => each.name)], rows));
  },
};
