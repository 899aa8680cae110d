"use strict";
// The first page: what is billing now, and the table of all runs, to sort, filter and choose from.

// `of` is what a column is sorted by, `show` what its cells hold. The name is always shown.
const NUMBER = (key, format) => ({ key, is_number: true, of: (run) => run[key], show: (run) => shown(run[key], format) });
const COLUMNS = [
  { key: "state", label: "State", is_usual: true, of: (run) => run.state, show: (run) => badge(run) },
  { key: "model", label: "Model", is_usual: true, of: (run) => run.num_params, show: model_of },
  { key: "phase", label: "Phase", is_usual: true, of: (run) => run.phase, show: (run) => phase_of(run) },
  { key: "step", label: "Step", is_usual: true, is_number: true, of: (run) => run.step, show: (run) => step_of(run) },
  { ...NUMBER("loss", figure), label: "Train loss", is_usual: true },
  { ...NUMBER("val_loss", figure), label: "Val. loss", is_usual: true },
  { ...NUMBER("val_bits_per_byte", figure), label: "Bits/byte", is_usual: true },
  { ...NUMBER("reward", figure), label: "Reward" },
  { ...NUMBER("num_tokens", short), label: "Phase tokens", is_usual: true },
  { ...NUMBER("tokens_per_s", short), label: "Tokens/s", is_usual: true },
  { ...NUMBER("mfu", percent), label: "MFU" },
  { ...NUMBER("lr", rate), label: "Learning rate" },
  { ...NUMBER("grad_norm", figure), label: "Gradient norm" },
  { ...NUMBER("memory_bytes", bytes), label: "GPU memory" },
  { key: "spend_usd", label: "Dollars", is_usual: true, is_number: true, of: (run) => run.spend_usd, show: money_of },
  { ...NUMBER("created_at", moment), label: "Started", is_usual: true },
  { ...NUMBER("duration_s", duration), label: "Duration", is_usual: true },
  { key: "where", label: "Provider, GPU", is_usual: true, of: where_of, show: where_of },
  { key: "preset", label: "Preset", of: (run) => run.preset, show: (run) => run.preset || NONE },
  { key: "project", label: "Project", of: (run) => run.project, show: (run) => run.project || NONE },
];
const MOST_COMPARED = 20;  // as in dashboard_app.py
const NAME = { key: "name", label: "Run", of: (run) => run.name };

const phase_of = (run) => {
  const at = run.phases.indexOf(run.phase);
  return run.phase ? run.phase + (run.phases.length > 1 && at >= 0 ? ` ${at + 1}/${run.phases.length}` : "") : NONE;
};
const step_of = (run) => is_known(run.step) ? el("span", {}, whole(run.step), run.num_steps && el("span", { class: "muted" }, " of " + whole(run.num_steps))) : NONE;

const runs_table = {
  runs: [], money: null, chosen: new Set(), sort: stored("sort", null), is_built: false,
  columns: new Set(stored("columns", COLUMNS.filter((each) => each.is_usual).map((each) => each.key))),
  text: "", state: "", origin: "",

  build() {
    if (this.is_built) return;
    this.is_built = true;
    const search = el("input", { type: "search", id: "find", placeholder: "Filter by name, model, GPU ...", "aria-label": "Filter runs by text" });
    $("all").replaceChildren(
      el("h1", { class: "visually-hidden" }, "All runs"),
      el("section", { class: "card", id: "money", "aria-label": "Money", hidden: true }),
      el("div", { class: "toolbar", id: "tools", hidden: true },
        search, el("span", { id: "picks" }),
        el("details", { class: "menu", id: "choose-columns" }, el("summary", { class: "btn" }, "Columns"), el("fieldset", { class: "card" },
          el("legend", { class: "visually-hidden" }, "Columns of the table"),
          ...COLUMNS.map((each) => el("label", {}, el("input", { type: "checkbox", value: each.key, checked: this.columns.has(each.key) }), each.label)))),
        el("span", { class: "spacer" }), el("span", { class: "muted small", id: "count" }),
        el("button", { type: "button", id: "clear", class: "btn-quiet", hidden: true, onclick: () => this.clear() }, "Clear selection"),
        el("button", { type: "button", id: "do-compare", class: "btn-primary", disabled: true, onclick: () => this.compare() }, "Compare")),
      el("div", { id: "runs" }));
    search.addEventListener("input", () => { this.text = search.value.trim().toLowerCase(); this.show(); });
    $("picks").addEventListener("change", (event) => { this[event.target.dataset.pick] = event.target.value; this.show(); });
    $("choose-columns").addEventListener("change", (event) => this.choose_column(event.target));
    $("choose-columns").addEventListener("keydown", (event) => { if (event.key === "Escape") { event.currentTarget.open = false; event.currentTarget.firstChild.focus(); } });
    $("runs").addEventListener("click", (event) => { const head = event.target.closest("button[data-sort]"); if (head) this.sort_by(head.dataset.sort); });
    $("runs").addEventListener("change", (event) => this.choose(event.target));
  },

  take(part) {
    if (part.section === "money") { this.money = part.value; this.show_money(); }
    else if (part.section === "runs") { this.announce(part.value); this.runs = part.value; this.show(); }
    else if (part.section.startsWith("failure")) show_failure(part.section, part.value);
  },

  announce(runs) {
    const before = new Map(this.runs.map((run) => [run.run, run.state]));
    const changed = runs.filter((run) => before.has(run.run) && before.get(run.run) !== run.state);
    if (changed.length) speak(changed.map((run) => `${run.name} is now ${run.state}.`).join(" "));
  },

  choose_column(box) {
    if (box.checked) this.columns.add(box.value); else this.columns.delete(box.value);
    store("columns", [...this.columns]);
    this.show();
  },

  choose(box) {
    if (box.dataset.all) for (const run of this.visible()) if (box.checked) this.chosen.add(run.run); else this.chosen.delete(run.run);
    if (box.dataset.run) if (box.checked) this.chosen.add(box.dataset.run); else this.chosen.delete(box.dataset.run);
    this.show();
  },

  clear() { this.chosen.clear(); this.show(); $("find").focus(); },

  compare() { location.hash = "compare=" + [...this.chosen].map(encodeURIComponent).join(","); },

  // Up, down, and then the order of the server again: live runs first, the newest first.
  sort_by(key) {
    const is_number = [NAME, ...COLUMNS].find((each) => each.key === key).is_number;
    const order = is_number ? [true, false] : [false, true], is_same = this.sort?.key === key;
    const is_down = is_same ? order[order.indexOf(this.sort.is_down) + 1] : order[0];
    this.sort = is_down === undefined ? null : { key, is_down };
    store("sort", this.sort);
    this.show();
  },

  visible() {
    const { text, state, origin } = this;
    const found = this.runs.filter((run) => {
      if (state && run.state !== state) return false;
      if (origin && ![run.preset, run.project].includes(origin)) return false;
      const said = [run.run, run.name, run.state, run.preset, run.project, run.family, run.base, run.phase, where_of(run), run.reason];
      return !text || said.some((each) => each && String(each).toLowerCase().includes(text));
    });
    const column = this.sort && [NAME, ...COLUMNS].find((each) => each.key === this.sort.key);
    if (!column) return found;
    const sign = this.sort.is_down ? -1 : 1;
    return found.map((run) => [column.of(run), run]).sort(([a], [b]) => {
      if (!is_known(a) || !is_known(b)) return is_known(b) - is_known(a);  // unknown ones last, in both directions
      return sign * (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    }).map(([, run]) => run);
  },

  show() {
    const known = new Set(this.runs.map((run) => run.run));
    for (const run of this.chosen) if (!known.has(run)) this.chosen.delete(run);
    if (!this.runs.length) return;
    $("tools").hidden = false;
    this.show_tools();
    const runs = this.visible(), columns = COLUMNS.filter((each) => this.columns.has(each.key));
    if (!runs.length) { fill($("runs"), el("p", { class: "empty card" }, "No run matches the filter.")); return; }
    fill($("runs"), el("div", { class: "card runs-card" }, el("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": "Runs" }, el("table", { class: "runs" },
      el("caption", { class: "visually-hidden" }, "Runs. The buttons in the header sort them."),
      el("thead", {}, el("tr", {},
        el("th", { class: "pick" }, el("input", { type: "checkbox", "data-all": "1", "aria-label": "Select all runs shown" })),
        ...[NAME, ...columns].map((each) => this.head(each)))),
      el("tbody", {}, ...runs.flatMap((run) => this.rows(run, columns)))))));
    for (const box of $("runs").querySelectorAll("input[data-run]")) box.checked = this.chosen.has(box.dataset.run);
    $("runs").querySelector("input[data-all]").checked = runs.every((run) => this.chosen.has(run.run));
  },

  head(column) {
    const is_sorted = this.sort?.key === column.key;
    const order = !is_sorted ? null : this.sort.is_down ? "descending" : "ascending";
    return el("th", { scope: "col", class: (column.is_number ? "num " : "") + (column === NAME ? "name" : ""), "aria-sort": order },
      el("button", { type: "button", class: "sort", "data-sort": column.key }, column.label,
        el("span", { class: "arrow", "aria-hidden": "true" }, is_sorted ? (this.sort.is_down ? "↓" : "↑") : "↕")));
  },

  // A row, and below it why the run ended or what is wrong with it.
  rows(run, columns) {
    const reason = reason_of(run), kind = [this.chosen.has(run.run) ? "chosen" : "", reason || run.problem ? "noted" : ""].join(" ").trim();
    const row = el("tr", { class: kind || null, "data-row": run.run },
      el("td", { class: "pick" }, el("input", { type: "checkbox", "data-run": run.run, "aria-label": "Select " + run.run })),
      el("th", { scope: "row", class: "name" },
        el("a", { href: "#run=" + encodeURIComponent(run.run) }, run.name),
        el("span", { class: "id muted" }, run.run.startsWith(run.name + "-") ? run.run.slice(run.name.length + 1) : run.run)),
      ...columns.map((each) => el("td", { class: each.is_number ? "num" : null, "data-column": each.key }, each.show(run))));
    if (!reason && !run.problem) return [row];
    return [row, el("tr", { class: "note-row " + kind }, el("td", { colspan: columns.length + 2 }, el("div", {},
      reason && el("span", { class: is_failed(run) ? "bad-text" : "muted" }, reason), run.problem && el("span", { class: "warn-text" }, run.problem))))];
  },

  show_tools() {
    const count = (of) => this.runs.reduce((found, run) => { for (const each of of(run)) if (each) found.set(each, (found.get(each) || 0) + 1); return found; }, new Map());
    const pick = (key, label, all, found) => found.size < 2 && !this[key] ? null : el("select", { "data-pick": key, "aria-label": label },
      el("option", { value: "" }, all), ...[...found].sort().map(([each, number]) => el("option", { value: each, selected: this[key] === each }, `${each} (${number})`)));
    fill($("picks"), pick("state", "Filter by state", "All states", count((run) => [run.state])),
      pick("origin", "Filter by preset or project", "All presets and projects", count((run) => [...new Set([run.preset, run.project])])));
    const number = this.chosen.size, shown_runs = this.visible().length;
    $("do-compare").disabled = number < 2 || number > MOST_COMPARED;
    $("do-compare").textContent = number ? `Compare ${number} runs` : "Compare";
    $("do-compare").title = number < 2 ? "Select two or more runs" : number > MOST_COMPARED ? `Select at most ${MOST_COMPARED} runs` : "";
    $("clear").hidden = !number;
    const left_out = this.money?.num_left_out ? ` · ${this.money.num_left_out} older: homing runs --all` : "";
    $("count").textContent = (shown_runs === this.runs.length ? `${shown_runs} runs` : `${shown_runs} of ${this.runs.length} runs`) + left_out;
  },

  show_money() {
    const money = this.money;
    $("money").hidden = false;
    $("money").className = "card" + (money.is_billing ? " bills" : "");
    // Show the command that ends everything with a copy button, like the other commands.
    const [first, ...rest] = money.words.flatMap((text) => text.split(" End all: ")).map((text) =>
      text.startsWith("homing ") ? command(text, "End everything that is billing") : el("div", {}, text));
    const live = this.runs.filter((run) => run.is_live).length;
    const figures = [["Live runs", live ? String(live) : "0"], ["Rate now", dollars(money.rate_usd_per_hour) + "/h"],
      ["Total so far", is_known(money.total_spend_usd) ? (money.is_total_at_most ? "at most " : "") + dollars(money.total_spend_usd) : NONE]];
    const others = money.others.map((each) => el("p", { class: "note" }, [each.kind, each.provider, each.id, each.state,
      is_known(each.spend_usd) ? dollars(each.spend_usd) : "", dollars(each.rate_usd_per_hour) + "/h", "billing " + each.billing].filter(Boolean).join(", ")));
    fill($("money"),
      el("div", { class: "money-row" },
        el("div", { class: "headline" }, el("div", { class: "big" }, first),
          el("div", { class: "muted small" }, money.asked_at ? "Providers queried at " + moment(money.asked_at) : "")),
        el("dl", { class: "stats" }, ...figures.map(([label, text]) => el("div", { class: "stat" }, el("dt", {}, label), el("dd", {}, text))))),
      ...rest, ...others, ...notes(money.problems));
    if (money.is_empty) fill($("runs"), el("div", { class: "card empty" }, el("p", {}, "There are no runs yet. Start with this command:"), command("homing quickstart")));
    document.title = money.is_billing ? dollars(money.rate_usd_per_hour) + "/h · homing" : "homing";
    if (this.runs.length) this.show_tools();
  },
};
