"use strict";
// Conversations in this browser. Each has its own key in localStorage, so that two tabs do not overwrite each other.
//
//   { id, title, is_named, mode: "chat" | "completion", system, created, updated, turns: [{ asked, answers }] }
//   answers: [{ model, said, end, is_failed, code, stats }], one per model that was asked
//
// They never leave the browser, except in requests to the model and in files that the person exports.

const CONVERSATION_KEY = "homing-chat:";
const MOST_CHARACTERS = 4_000_000;  // browsers allow about 5 million for everything of one address
const LONGEST_TITLE = 48;

function new_conversation(mode) {
  const now = Date.now();
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", is_named: false, mode, system: "", created: now, updated: now, turns: [] };
}

const stored_keys = () => Object.keys(browser_storage).filter((key) => key.startsWith(CONVERSATION_KEY));

// All conversations, the newest first.
function list_conversations() {
  const found = [];
  for (const key of stored_keys()) {
    try {
      const one = JSON.parse(browser_storage.getItem(key));
      if (Array.isArray(one.turns)) found.push(one);
    } catch { /* not written by this page */ }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

// Return "" or why the conversation could not be kept. A conversation without messages is not kept.
function keep_conversation(one) {
  if (!one.turns.length && !one.system) return "";
  const key = CONVERSATION_KEY + one.id, text = JSON.stringify(one);
  const others = stored_keys().reduce((sum, name) => sum + (name === key ? 0 : browser_storage.getItem(name).length), 0);
  try {
    if (others + text.length > MOST_CHARACTERS) throw new RangeError("too much");
    browser_storage.setItem(key, text);
    return "";
  } catch {
    return "The storage for conversations in this browser is full, so the newest messages are not kept. Export old conversations and delete them.";
  }
}

function forget_conversation(id) {
  browser_storage.removeItem(CONVERSATION_KEY + id);
}

function title_of(text) {
  const line = text.trim().split("\n")[0].trim();
  if (line.length <= LONGEST_TITLE) return line;
  const cut = line.slice(0, LONGEST_TITLE), space = cut.lastIndexOf(" ");
  return (space > 20 ? cut.slice(0, space) : cut) + "…";
}

function matches(one, words) {
  const texts = [one.title, ...one.turns.flatMap((turn) => [turn.asked, ...turn.answers.map((answer) => answer.said)])];
  return texts.join("\n").toLowerCase().includes(words.toLowerCase());
}

// The answer that belongs to the conversation of this model: its own, or else the first.
function answer_of(turn, model) {
  return turn.answers.find((answer) => answer.model === model) || turn.answers[0];
}

// What the model reads: the messages before the turn with this number, and its question.
function messages_for(one, number, model) {
  const before = one.turns.slice(0, number).filter((turn) => answer_of(turn, model)?.said);
  const asked = one.turns[number].asked;
  if (one.mode === "completion") return before.map((turn) => turn.asked + answer_of(turn, model).said).join("") + asked;
  return [
    ...(one.system.trim() ? [{ role: "system", content: one.system }] : []),
    ...before.flatMap((turn) => [{ role: "user", content: turn.asked }, { role: "assistant", content: answer_of(turn, model).said }]),
    { role: "user", content: asked },
  ];
}

// -- export and import: one conversation per line, as `homing data check` and `homing prep` read them --

// Characters that no person types; data for training must not contain them.
const clean = (text) => text.toWellFormed().replace(/[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]|[\ufdd0-\ufdef\ufffe\uffff]/g, "");

// Return { text, count, num_left_out }: conversations without an answer cannot be learned from.
function export_lines(all) {
  const lines = all.map(export_line).filter(Boolean);
  return { text: lines.map((line) => line + "\n").join(""), count: lines.length, num_left_out: all.length - lines.length };
}

function export_line(one) {
  const messages = one.mode === "chat" && one.system.trim() ? [{ role: "system", content: clean(one.system) }] : [];
  for (const turn of one.turns) {
    const asked = clean(turn.asked), said = clean(turn.answers[0]?.said || "");
    if (!said.trim()) continue;
    if (asked.trim()) messages.push({ role: "user", content: asked }, { role: "assistant", content: said });
    else if (messages.at(-1)?.role === "assistant") messages.at(-1).content += asked + said;  // a text that went on
  }
  return messages.at(-1)?.role === "assistant" ? JSON.stringify({ messages }) : "";
}

// Return { found, problems }: conversations, and a sentence for each line that is none.
function import_lines(text, mode) {
  const found = [], problems = [];
  text.split("\n").forEach((line, i) => {
    if (!line.trim()) return;
    try {
      const value = JSON.parse(line);
      found.push(import_conversation(Array.isArray(value) ? value : value.messages, mode));
    } catch (error) {
      problems.push(`Line ${i + 1}: ${error instanceof Problem ? error.message : "not JSON."}`);
    }
  });
  return { found, problems };
}

function import_conversation(messages, mode) {
  if (!Array.isArray(messages)) throw new Problem("no list of messages.", "format");
  const one = new_conversation(mode);
  for (const { role, content } of messages) {
    const last = one.turns.at(-1);
    if (typeof content !== "string") throw new Problem("a message whose content is not text.", "format");
    if (role === "system" && !last && !one.system) one.system = content;
    else if (role === "user" && (!last || last.answers.length)) one.turns.push({ asked: content, answers: [] });
    else if (role === "assistant" && last && !last.answers.length) last.answers.push({ model: "imported", said: content, end: "", is_failed: false, stats: null });
    else throw new Problem("messages in another order than system, user, assistant, user, assistant.", "format");
  }
  if (!one.turns.length) throw new Problem("no messages.", "format");
  one.title = title_of(one.turns[0].asked);
  return one;
}

function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/jsonl" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
