"use strict";
// One conversation on the screen. A chat is a list of turns: a question, and the answer of one model or of two next to
// each other. A text of a base model is one document in which your parts and the model's are told apart.
//
// The thread shows; what its buttons do is in page.js, which passes `act`: { regenerate, edit, retry, start_with }.

const SVG = "http://www.w3.org/2000/svg";

function icon(name) {
  const made = document.createElementNS(SVG, "svg"), use = document.createElementNS(SVG, "use");
  made.setAttribute("aria-hidden", "true");
  use.setAttribute("href", "#i-" + name);
  made.append(use);
  return made;
}

function icon_button(name, label, onclick, properties = {}) {
  return el("button", { type: "button", class: "btn-quiet act", "aria-label": label, title: label, onclick, ...properties }, icon(name));
}

function copy_icon(label, text) {
  const button = icon_button("copy", label, async () => {
    await copy_text(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

// "42 tokens · 58 tok/s · complete"
function describe_stats(stats) {
  if (!stats) return "";
  const { num_tokens, is_about, tokens_per_s, finish } = stats;
  const count = `${is_about ? "about " : ""}${num_tokens.toLocaleString("en")} ${num_tokens === 1 ? "token" : "tokens"}`;
  const rate = tokens_per_s ? `${tokens_per_s < 10 ? tokens_per_s.toFixed(1) : Math.round(tokens_per_s).toLocaleString("en")} tok/s` : "";
  return [count, rate, finish].filter(Boolean).join(" · ");
}

// What follows an answer: why it ended, or what went wrong and what to do.
function end_note(turn, answer, act) {
  if (!answer.end) return null;
  if (!answer.is_failed) return el("p", { class: "end muted small" }, answer.end);
  const button = answer.code === "context_length_exceeded"
    ? el("button", { type: "button", class: "btn-small only-last", onclick: () => act.start_with(turn.asked) }, "New conversation with this message")
    : el("button", { type: "button", class: "btn-small only-last", onclick: () => act.retry(turn) }, "Try again");
  return el("div", { class: "end note bad", role: "alert" }, el("span", {}, answer.end), button);
}

class AnswerView {
  constructor(turn, answer, { is_chat, is_compared, act }) {
    this.turn = turn;
    this.answer = answer;
    this.is_chat = is_chat;
    this.act = act;
    this.timer = 0;
    this.is_raw = false;
    this.said = is_chat ? el("div", { class: "said" }) : el("span", { class: "said" });
    this.markdown = is_chat ? new MarkdownView(this.said) : null;
    this.end = el("div", { class: "end-place" });
    this.stats = el("span", { class: "stats muted num" });
    if (is_chat || is_compared) {
      const model = el("h3", { class: "who" }, answer.model);
      this.foot = el("div", { class: "foot" }, this.buttons(), this.stats);
      this.node = el("article", { class: "answer" + (is_chat ? "" : " plain") }, model, this.said, this.end, this.foot);
    } else {
      this.foot = this.stats;
      this.node = this.said;
    }
  }

  buttons() {
    const raw = icon_button("raw", "Show as plain text", () => {
      this.is_raw = !this.is_raw;
      raw.setAttribute("aria-pressed", String(this.is_raw));
      this.render();
    }, { "aria-pressed": "false" });
    return el("span", { class: "acts" },
      copy_icon("Copy answer", () => this.answer.said),
      icon_button("again", "Regenerate", () => this.act.regenerate(this.turn), { class: "btn-quiet act only-last" }),
      this.is_chat ? raw : null);
  }

  begin() {
    this.is_growing = true;
    this.node.classList.add("growing");
    this.node.setAttribute("aria-busy", "true");
  }

  // Render at most once per frame, and less often if rendering takes long, so that the page stays responsive.
  say(piece, after) {
    this.answer.said += piece;
    if (this.timer) return;
    this.timer = setTimeout(() => {
      const began = performance.now();
      this.timer = 0;
      after(() => this.render());
      this.wait_ms = Math.max(16, 4 * (performance.now() - began));
    }, this.wait_ms || 16);
  }

  render() {
    if (!this.is_chat) {
      this.said.textContent = this.answer.said;
    } else if (this.is_raw) {
      this.said.classList.add("raw");
      this.said.replaceChildren(this.answer.said);
    } else {
      if (this.said.classList.contains("raw")) this.markdown.clear();
      this.said.classList.remove("raw");
      this.markdown.show(this.answer.said, Boolean(this.is_growing));
    }
  }

  finish() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.is_growing = false;
    this.node.classList.remove("growing");
    this.node.removeAttribute("aria-busy");
    this.render();
    this.stats.textContent = describe_stats(this.answer.stats);
    this.node.classList.toggle("is-empty", !this.answer.said);
    const note = end_note(this.turn, this.answer, this.act);
    this.end.replaceChildren(...(note ? [note] : []));
  }
}

class Thread {
  constructor(container, act) {
    this.container = container;
    this.act = act;
  }

  show(conversation) {
    this.conversation = conversation;
    this.is_chat = conversation.mode === "chat";
    this.container.replaceChildren();
    this.page = null;
    if (this.is_chat && conversation.system.trim()) {
      this.container.append(el("details", { class: "system" }, el("summary", {}, "System prompt"), el("p", { class: "plain" }, conversation.system)));
    }
    for (const turn of conversation.turns) for (const view of this.add(turn)) view.finish();
    this.container.classList.toggle("is-wide", conversation.turns.some((turn) => turn.answers.length > 1));
  }

  // Append a turn, and return the views of its answers.
  add(turn) {
    const is_compared = turn.answers.length > 1;
    const views = turn.answers.map((answer) => new AnswerView(turn, answer, { is_chat: this.is_chat, is_compared, act: this.act }));
    if (is_compared) this.container.classList.add("is-wide");
    const answers = el("div", { class: "answers" + (is_compared ? " two" : "") }, ...views.map((view) => view.node));
    if (this.is_chat) this.container.append(el("section", { class: "turn" }, this.question(turn), answers));
    else this.add_to_text(turn, is_compared, views, answers);
    return views;
  }

  question(turn) {
    const bubble = fill(el("div", { class: "bubble", dir: "auto" }), plain(turn.asked));
    const acts = el("span", { class: "acts" },
      icon_button("pencil", "Edit message", () => this.edit(turn)), copy_icon("Copy message", () => turn.asked));
    return el("div", { class: "asked" }, el("h3", { class: "visually-hidden" }, "You"), bubble, acts);
  }

  // All turns of a text are parts of one document; what can be done with it is below.
  add_to_text(turn, is_compared, views, answers) {
    if (!this.page) {
      this.text_end = el("div", { class: "end-place" });
      this.text_stats = el("span", { class: "stats muted num" });
      const acts = el("span", { class: "acts" },
        copy_icon("Copy the text", () => this.whole_text()),
        icon_button("again", "Regenerate", () => this.act.regenerate(this.conversation.turns.at(-1))),
        icon_button("pencil", "Edit the text", () => this.edit(this.conversation.turns.at(-1))));
      this.page = el("article", { class: "document", dir: "auto" });
      this.container.append(el("section", { class: "turn" },
        el("p", { class: "legend small muted" }, el("span", { class: "given" }, "Your text"), " and the model's continuation"),
        this.page, this.text_end, el("div", { class: "foot" }, acts, this.text_stats)));
    }
    this.page.append(el("span", { class: "given" }, turn.asked), ...(is_compared ? [answers] : views.map((view) => view.node)));
    this.text_end.replaceChildren();
    this.text_stats.textContent = "";
    if (!is_compared && views.length) [views[0].end, views[0].stats] = [this.text_end, this.text_stats];
  }

  whole_text() {
    return messages_for({ ...this.conversation, turns: [...this.conversation.turns, { asked: "", answers: [] }] }, this.conversation.turns.length, "");
  }

  // Replace a question by a form. In a text, the form holds all of it, because it is one document.
  edit(turn) {
    if (this.container.querySelector("form") || document.body.classList.contains("is-running")) return;
    const number = this.conversation.turns.indexOf(turn), later = this.conversation.turns.length - number - 1;
    const place = this.is_chat ? this.container.querySelectorAll(".turn")[number].querySelector(".asked") : this.page;
    const box = el("textarea", { "aria-label": this.is_chat ? "Edit your message" : "Edit the text", rows: "1" });
    box.value = this.is_chat ? turn.asked : this.whole_text();
    const hint = !this.is_chat ? "All of this becomes your text, and the model continues it."
      : later ? `Sending this removes the answer and the ${later === 1 ? "turn" : `${later} turns`} after it.` : "Sending this replaces the answer.";
    const form = el("form", { class: "edit" }, box, el("span", { class: "hint muted small" }, hint),
      el("span", { class: "row" }, el("button", { type: "button", class: "btn-small", onclick: () => close() }, "Cancel"), el("button", { class: "btn-small btn-primary" }, "Send")));
    const close = () => { form.replaceWith(place); $("text").focus(); };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!box.value.trim()) return;
      close();
      this.act.edit(turn, box.value);
    });
    box.addEventListener("keydown", (event) => {
      if (is_send_key(event)) { event.preventDefault(); form.requestSubmit(); }
      if (event.key === "Escape") { event.stopPropagation(); close(); }
    });
    box.addEventListener("input", () => grow(box));
    place.replaceWith(form);
    grow(box);
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

// Enter sends, but not while an input method composes a word, and not on a touch screen, which has no Shift+Enter.
const is_touch = () => matchMedia("(pointer: coarse)").matches;
const is_send_key = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !is_touch();

function grow(box) {
  box.style.height = "auto";
  box.style.height = box.scrollHeight + 2 + "px";
}
