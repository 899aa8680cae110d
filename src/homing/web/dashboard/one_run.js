"use strict";
// The page of one run: why it failed, its figures, charts, commands, samples, settings, events, logs and receipt.

const RUN_CHARTS = [LOSSES, ...CHARTS.filter((each) => !["loss", "val_loss"].includes(each.key))];
const TABS = [["charts", "Charts"], ["samples", "Samples"], ["settings", "Settings"], ["events", "Events and logs"], ["files", "Checkpoints and receipt"]];
// Events that are marked on the charts, with the words for them.
const MARKS = [
  [/^resumed$|restarted$/, "restart"], [/^land/, "landing"], [/^preempt/, "preempted"], [/^stop_asked$/, "stop asked"],
  [/^limit_reached$/, "limit"], [/^step_skipped$/, "step skipped"],
];

const one_run = {
  id: "", board: null,

  open(id, options) {
    this.close();
    Object.assign(this, {
      id, head: null, curve: new Curve(), events: [], samples: [], logs: {}, program: "trainer", config: undefined, report: null,
      failure: null, next: [], text: {}, tab: options.get("tab") || "charts", by: "step", picked: "",
      view: { ...VIEW, ...stored("view", {}), phase: "" },
    });
    this.board = new Board(RUN_CHARTS, {
      view: this.view, changed: () => {}, lines: () => [{ run: id, name: this.head?.name || id, curve: this.curve, color: 0 }],
      phases: () => this.curve.phases.map((each) => each.name), marks: (axis) => this.marks(axis),
      nothing: () => this.view.x === "usd" && this.curve.points.length ? "This run has no dollars: it was trained on this computer."
        : this.yet("No metrics yet. They appear after the first steps.", "No metrics are recorded."),
    });
    const search = (name, label) => el("input", { type: "search", id: "find-" + name, placeholder: label, "aria-label": label,
      oninput: (event) => { this.text[name] = event.target.value.trim().toLowerCase(); this["show_" + name](); } });
    const tabs = TABS.map(([key, label]) => el("button", { type: "button", role: "tab", id: "tab-" + key, "data-tab": key, "aria-controls": "panel-" + key }, label));
    const panel = (key, ...children) => el("div", { role: "tabpanel", id: "panel-" + key, "aria-labelledby": "tab-" + key, hidden: true }, ...children);
    const section = (title, ...children) => el("section", { class: "card" }, el("div", { class: "title-row" }, el("h2", {}, title)), ...children);
    const box = (key, kind = "") => el("div", { id: key, class: kind });
    $("one").replaceChildren(
      box("head"), box("failure"), box("problems"), box("figures"),
      el("div", { class: "tabs", role: "tablist", "aria-label": "Parts of this page", id: "tabs" }, ...tabs),
      panel("charts", this.board.controls, this.board.empty, this.board.grid, section("Commands to run in a terminal", box("next"))),
      panel("samples", section("Evaluations", box("evaluations")), section("Samples", el("div", { class: "toolbar", id: "sample-tools" }), box("samples"))),
      panel("settings", section("Settings", search("settings", "Filter settings"), box("settings"))),
      panel("events", section("Events", search("events", "Filter events"), box("events", "scroll")),
        section("Log", el("div", { class: "toolbar" }, el("div", { id: "programs", class: "segment", role: "group", "aria-label": "Program" }), search("log", "Search the log")),
          el("pre", { id: "log", class: "scroll", tabindex: 0, role: "region", "aria-label": "Lines of the log" }))),
      panel("files", section("Checkpoints and models", box("kept")), section("Receipt", box("attempts")),
        section("Output of homing status", el("dl", { id: "rows", class: "rows" }))));
    $("tabs").addEventListener("click", (event) => { if (event.target.dataset.tab) this.choose(event.target.dataset.tab); });
    $("tabs").addEventListener("keydown", (event) => this.move(event));
    $("sample-tools").addEventListener("change", (event) => {
      if (event.target.id === "by") { this.by = event.target.value; this.picked = ""; } else { this.picked = event.target.value; }
      this.show_samples();
    });
    $("programs").addEventListener("click", (event) => { if (event.target.dataset.program) { this.program = event.target.dataset.program; this.show_log(); } });
    fill($("head"), el("div", { class: "title-row" }, el("h1", {}, id)), el("p", { class: "muted" }, "Loading. A remote store takes a moment."));
    this.show_tab();
    document.title = id + " · homing";
    return `api/runs/${encodeURIComponent(id)}/live`;
  },

  close() {
    this.board?.destroy();
    this.board = null;
    $("one").replaceChildren();
  },

  // -- tabs --

  choose(key) {
    this.tab = key;
    history.replaceState(null, "", `#run=${encodeURIComponent(this.id)}` + (key === "charts" ? "" : "&tab=" + key));
    this.show_tab();
  },

  move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const at = TABS.findIndex(([key]) => key === this.tab);
    this.choose(TABS[(at + by + TABS.length) % TABS.length][0]);
    $("tab-" + this.tab).focus();
  },

  show_tab() {
    if (!TABS.some(([key]) => key === this.tab)) this.tab = "charts";
    for (const [key] of TABS) {
      const is_shown = key === this.tab;
      $("tab-" + key).setAttribute("aria-selected", String(is_shown));
      $("tab-" + key).tabIndex = is_shown ? 0 : -1;
      $("panel-" + key).hidden = !is_shown;
    }
    this.show_all();
  },

  // Only what is on the open tab is built; the rest waits until it is opened.
  show_all() {
    const shows = { charts: [], samples: ["evaluations", "samples"], settings: ["settings"], events: ["events", "log"], files: ["files"] }[this.tab];
    for (const each of shows) this["show_" + each]();
    if (this.tab === "charts") { this.board.show_controls(); this.board.draw(); }
  },

  // -- parts --

  take(part) {
    const name = part.section;
    if (name === "head") this.show_head(part.value);
    else if (name === "failure") { this.failure = part.value; this.show_failure(); }
    else if (name === "problems") fill($("problems"), notes(part.value));
    else if (name === "next") { this.next = part.value; fill($("next"), part.value.map((each) => command(each.command, each.why))); this.show_failure(); }
    else if (name === "rows") fill($("rows"), part.value.flatMap(([label, text]) => [el("dt", {}, label), el("dd", {}, text)]));
    else if (name === "report") { this.report = part.value; this.show_if("files"); }
    else if (name === "config") { this.config = part.value; this.show_if("settings"); }
    else if (name === "point_columns") this.curve.columns = part.value;
    else if (name === "points") { this.curve.add(part.items, part.is_new); this.show_if("charts"); this.show_if("samples"); }
    else if (name === "events") { this.events = part.is_new ? part.items : this.events.concat(part.items); this.show_if("events"); }
    else if (name === "samples") { this.samples = part.is_new ? part.items : this.samples.concat(part.items); this.show_if("samples"); }
    else if (name.startsWith("log ")) {
      const program = name.slice(4), before = part.is_new ? [] : this.logs[program] || [];
      this.logs[program] = before.concat(part.items).slice(-400);
      this.show_if("events");
    }
  },

  show_if(tab) { if (this.tab === tab) this.show_all(); },

  // A run that has ended gets no more data, so say so.
  yet(while_live, after) { return this.head && !this.head.is_live ? after : while_live; },

  show_head(head) {
    if (this.head && this.head.state !== head.state) speak(`${head.name} is now ${head.state}.`);
    const is_other = !this.head || this.head.is_live !== head.is_live;
    this.head = head;
    const reason = is_failed(head) ? "" : head.reason;
    fill($("head"),
      el("div", { class: "title-row" }, el("h1", {}, head.name), badge(head), el("span", { class: "muted id" }, head.run)),
      el("p", { class: "muted", id: "summary" }, [model_of(head), head.preset && `preset ${head.preset}`, head.project && `project ${head.project}`,
        head.is_trained_here ? "trained on this computer, nothing is billed" : where_of(head), reason].filter((each) => each && each !== NONE).join(" · ")));
    const stat = (label, value) => value === NONE ? null : el("div", { class: "stat" }, el("dt", {}, label), el("dd", {}, value));
    const of = (key, format) => shown(head[key], format);
    fill($("figures"), el("dl", { class: "stats card" }, ...[
      stat(head.phase && head.phases.length > 1 ? `Step of ${head.phase}` : "Step", step_of(head)),
      head.num_steps && is_known(head.step) && head.is_live ? el("div", { class: "stat" }, el("dt", {}, "Done"), el("dd", {}, percent(head.step / head.num_steps), meter(head.step / head.num_steps, "Steps done"))) : null,
      stat("Training loss", of("loss", figure)), stat("Validation loss", of("val_loss", figure)), stat("Bits per byte", of("val_bits_per_byte", figure)),
      stat("Reward", of("reward", figure)), stat("Validation reward", of("val_reward", figure)),
      stat(head.phase && head.phases.length > 1 ? `Tokens of ${head.phase}` : "Tokens", of("num_tokens", short)), stat("Tokens/s", of("tokens_per_s", short)), stat("MFU", of("mfu", percent)),
      stat("GPU in use", of("gpu_share", percent)), stat("GPU memory in use", of("gpu_memory_share", percent)),
      stat("Dollars", money_of(head)), stat("Rate", shown(head.is_billing ? head.rate_usd_per_hour : null, (n) => dollars(n) + "/h")),
      stat("Duration", of("duration_s", duration)), head.is_live ? stat("Left in this phase", of("eta_s", duration)) : null,
    ].filter(Boolean)));
    if (is_other) this.show_all();
    document.title = (head.line.split(" | ").slice(0, 2).join(", ") || head.state) + " · " + head.name;
  },

  show_failure() {
    const found = this.failure;
    if (!found) { fill($("failure")); return; }
    const where = found.phase ? ` in ${found.phase}, step ${whole(found.step)}` : "";
    fill($("failure"), el("section", { class: "card failed", "aria-label": "Why it failed" },
      el("h2", {}, "This run failed" + where),
      el("p", {}, found.reason || "It left no reason. The last lines of its log may show one.", is_known(found.exit_code) ? ` Exit code ${found.exit_code}.` : ""),
      found.log_tail.length ? el("pre", { class: "code-block", tabindex: 0, role: "region", "aria-label": "Last lines of the log" }, found.log_tail.join("\n")) : null,
      el("p", {}, "What to do: read the log, fix the cause, and resume from the last checkpoint."),
      ...this.next.filter((each) => /logs|resume|train/.test(each.command)).slice(0, 2).map((each) => command(each.command, each.why))));
  },

  // Where phases begin, and what interrupted the run.
  marks(axis) {
    const phases = this.view.phase || this.curve.phases.length < 2 ? [] : this.curve.phases.map((each) => ({ x: this.curve.x[axis][each.at], name: each.name, is_phase: true }));
    const own = this.events.map((event) => ({ event, name: MARKS.find(([kind]) => kind.test(event.kind))?.[1] }))
      .filter(({ event, name }) => name && (!this.view.phase || event.phase === this.view.phase))
      .map(({ event, name }) => ({ x: this.curve.place(event, axis), name }));
    return [...phases, ...own.slice(-30)].filter((each) => is_known(each.x));
  },

  show_evaluations() {
    const { values } = this.curve, rows = [];
    for (let at = 0; at < (values?.step || []).length; at++) {
      if (![values.val_loss[at], values.val_reward[at]].some(is_known)) continue;
      rows.push([values.phase[at], whole(values.step[at]), shown(values.val_loss[at], figure), shown(values.val_bits_per_byte[at], figure), shown(values.val_reward[at], figure)]);
    }
    const recent = rows.slice(-200).toReversed();
    fill($("evaluations"), rows.length ? el("div", { class: "scroll" }, table("Evaluations, newest first", ["Phase", "Step", "Validation loss", "Bits per byte", "Reward"], recent, [1, 2, 3, 4]))
      : el("p", { class: "empty" }, this.yet("No evaluation yet.", "No evaluation is recorded.")));
  },

  show_samples() {
    if (!this.samples.length) {
      fill($("sample-tools"));
      fill($("samples"), el("p", { class: "empty" }, this.yet("None yet. The trainer writes samples from time to time.", "No samples are recorded.")));
      return;
    }
    const title = (sample) => `${sample.phase}, step ${shown(sample.step, whole)}`;
    const order = new Map(this.curve.phases.map((each, at) => [each.name, at]));
    const samples = [...this.samples].sort((a, b) => (order.get(b.phase) ?? -1) - (order.get(a.phase) ?? -1) || b.step - a.step);
    const prompts = [...new Set(samples.flatMap((sample) => sample.parts.map((part) => part.prompt)))];
    const options = this.by === "step" ? samples.map((each) => [each.name, title(each)]) : prompts.map((each) => [each, each || "(no prompt)"]);
    if (!options.some(([value]) => value === this.picked)) this.picked = options[0][0];
    fill($("sample-tools"), choice("by", "Show", [["step", "one step, all prompts"], ["prompt", "one prompt, all steps"]], this.by),
      choice("picked", this.by === "step" ? "Step" : "Prompt", options, this.picked));
    const wanted = samples.flatMap((sample) => sample.parts.map((part) => ({ sample, part })))
      .filter(({ sample, part }) => this.by === "step" ? sample.name === this.picked : part.prompt === this.picked);
    fill($("samples"), wanted.map(({ sample, part }) => el("article", { class: "sample" },
      el("h3", { class: "small muted" }, this.by === "step" ? part.prompt || title(sample) : title(sample)),
      el("div", { class: "sample-text" }, part.prompt ? el("b", {}, part.prompt) : null, part.text))));
  },

  show_settings() {
    const text = this.text.settings || "", origin = this.config?.origin || {};
    const found = [...settings_of(this.config)].filter(([key, value]) => !text || key.toLowerCase().includes(text) || value.toLowerCase().includes(text));
    const rows = found.map(([key, value]) => [el("code", {}, key), el("code", {}, value), el("span", { class: "muted" }, origin[key] || "")]);
    fill($("settings"), rows.length ? table("Settings", ["Setting", "Value", "From"], rows)
      : el("p", { class: "empty" }, this.config ? "No setting matches." : this.yet("The settings are not known yet.", "run.json is not recorded.")));
  },

  show_events() {
    const text = this.text.events || "";
    const found = this.events.filter((event) => !text || (event.kind + " " + event.text).toLowerCase().includes(text)).toReversed();
    fill($("events"), found.length ? el("ol", { class: "events" }, ...found.map((event) => el("li", { class: event.is_alert ? "alert" : null },
      el("time", { class: "muted num", title: event.t ? new Date(event.t * 1000).toLocaleString() : null }, event.t ? moment(event.t) : ""), el("span", {}, event.text))))
      : el("p", { class: "empty" }, text ? "No event matches." : this.yet("No events yet.", "No events are recorded.")));
  },

  show_log() {
    const programs = Object.keys(this.logs), box = $("log"), text = this.text.log || "";
    fill($("programs"), programs.length < 2 ? [] : programs.map((each) => el("button", { type: "button", class: "btn-small", "data-program": each, "aria-pressed": String(each === this.program) }, each)));
    const is_at_end = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const lines = (this.logs[this.program] || []).filter((line) => !text || line.toLowerCase().includes(text));
    box.textContent = lines.length ? lines.join("\n") : text ? "No line matches." : this.yet("Nothing yet.", "No log is recorded.");
    if (is_at_end) box.scrollTop = box.scrollHeight;
  },

  show_files() {
    const report = this.report;
    if (!report) { fill($("kept"), el("p", { class: "empty" }, "Loading.")); return; }
    const hashes = (each) => Object.entries(each.weights).map(([name, hash]) => el("div", { class: "hash" }, el("code", { title: hash }, hash.slice(0, 12)), el("span", { class: "muted" }, " " + name)));
    fill($("kept"), report.kept.length ? table("Checkpoints and models", ["Checkpoint", "Val. loss", "Size", "SHA-256", "Where"],
      report.kept.map((each) => [el("span", {}, `${each.phase} step ${whole(each.step)} `, ...each.called.map((name) => el("span", { class: "badge" }, name)), each.problem && el("div", { class: "bad-text" }, each.problem)),
        shown(each.val_loss, figure), bytes(each.num_bytes), el("div", {}, ...hashes(each)), el("code", { class: "path" }, each.where)]), [1, 2])
      : el("p", { class: "empty" }, this.yet("None yet. A checkpoint appears once it is complete.", "None found.")));
    fill($("attempts"), report.attempts.length ? table("Receipt", ["Attempt", "Provider", "GPU", "Rate", "Dollars", "From", "Until", "Billing"],
      report.attempts.map((each) => [String(each.number), each.provider, each.offer, dollars(each.rate_usd_per_hour) + "/h",
        (each.is_at_most ? "at most " : "") + dollars(each.spend_usd), shown(each.began_at, moment), shown(each.ended_at, moment), each.billing]), [0, 3, 4])
      : el("p", { class: "empty" }, "Nothing was rented for this run."));
  },
};
