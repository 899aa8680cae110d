"use strict";
// The page around a conversation: login, models, sending and stopping, composer, settings, keys.

const CURRENT_KEY = "homing-chat-current", DRAFT_KEY = "homing-chat-draft", MODEL_KEY = "homing-chat-model";
const NEARLY_FULL = 0.85;  // share of the context from which the page suggests a new conversation
const EXAMPLES = {
  chat: ["Introduce yourself in two sentences.", "Explain to a child what a language model is.", "Write a short poem about the sea."],
  completion: ["Once upon a time, there was a", "The most important thing that I have learned is", "Dear friend,\n\nI am writing to you because"],
};
let models = [], model = null, other = null;  // `other` answers too while models are compared
let is_leaving = false, storage_problem = "";
let conversation = null, running = null;      // running: the AbortController of the answers that are being generated
const forgotten = new Set();                  // ids of deleted conversations, whose last answer may still arrive
const settings = new Settings($("sampling"));
const thread = new Thread($("thread"), { regenerate, edit, retry: regenerate, start_with });

// -- connecting --

async function connect() {
  $("connect").disabled = true;
  try {
    models = await fetch_models();
  } catch (problem) {
    return log_in(problem.message, problem.code !== "unauthorized");
  } finally {
    $("connect").disabled = false;
  }
  $("login").hidden = true;
  $("app").hidden = false;
  const is_first = !conversation;
  model = models.find((each) => each.id === (model?.id || tab_storage.getItem(MODEL_KEY))) || models[0];
  if (is_first) $("text").value = tab_storage.getItem(DRAFT_KEY) || "";
  if (!running) open_conversation(conversation || stored(tab_storage.getItem(CURRENT_KEY)) || new_conversation(model.mode));
  show_list();
  focus_box();
}

// Ask for the token, or if the server is silent, only say so. The conversation and the draft stay as they are.
function log_in(why, is_silent = false) {
  $("app").hidden = true;
  $("login").hidden = false;
  $("why").textContent = why;
  $("connect").textContent = is_silent ? "Try again" : "Connect";
  $("token").value = is_silent ? token : "";
  $("token").focus();
}

const stored = (id) => list_conversations().find((one) => one.id === id);

function focus_box() {
  if (!is_touch()) $("text").focus();  // on a touch screen, this would open the keyboard
}

// -- models --

const is_chat = () => conversation.mode === "chat";
// A base model cannot answer messages. Any model can continue a text.
const fitting = () => models.filter((each) => !is_chat() || each.mode === "chat");

function show_models() {
  const fits = fitting(), others = fits.filter((each) => each !== model);
  if (!others.includes(other)) other = null;
  const options = (list, chosen) => list.map((each) => el("option", { value: each.id, selected: each === chosen }, each.id));
  $("name").textContent = document.title = model.id;
  $("name").classList.toggle("visually-hidden", models.length > 1);
  $("model").hidden = models.length < 2;
  $("model").replaceChildren(...options(models, model));
  $("compare").hidden = models.length < 2;
  $("compare").disabled = !others.length;
  $("compare").title = others.length ? "Send each message to two models" : "The other models are base models. To compare continuations of a text, choose one of them first.";
  $("compare").setAttribute("aria-pressed", String(Boolean(other)));
  $("with").hidden = !other;
  $("other").replaceChildren(...options(others, other));
  $("mode").textContent = model.mode === "chat" ? "chat model" : "base model";
  const purpose = model.mode === "chat" ? "It was trained to answer messages." : "It continues a text; it was not trained for chat.";
  $("mode").title = model.phase ? `${purpose} Checkpoint: phase ${model.phase}, step ${model.step}.` : purpose;
  settings.show_defaults(model);
}

function choose_model(id) {
  model = models.find((each) => each.id === id);
  tab_storage.setItem(MODEL_KEY, id);
  const fits = is_chat() === (model.mode === "chat") || (conversation.turns.length && fitting().includes(model));
  if (fits) open_conversation(conversation);
  else open_conversation(new_conversation(model.mode));
}

// -- the conversation --

function open_conversation(one) {
  running?.abort();
  conversation = one;
  if (!fitting().includes(model) && fitting().length) model = fitting()[0];
  tab_storage.setItem(CURRENT_KEY, one.id);
  thread.show(one);
  show_models();
  show_state();
  show_list();
  $("log").scrollTop = $("log").scrollHeight;
}

function start_conversation() {
  close_side();
  open_conversation(new_conversation(model.mode));
  focus_box();
}

function start_with(text) {
  const before = conversation;
  const last = before.turns.at(-1);
  if (last && last.asked === text && !last.answers.some((answer) => answer.said)) {
    before.turns.pop();  // it had no answer, and moves to the new conversation
    keep(before);
  }
  start_conversation();
  $("text").value = text;
  box_changed();
}

function keep(one) {
  if (forgotten.has(one.id)) return;
  one.updated = Date.now();
  storage_problem = keep_conversation(one);
  show_notice();
}

async function send(text) {
  if (running || !text.trim() || !may_send()) return;
  if (!conversation.is_named && !conversation.turns.length) conversation.title = title_of(text);
  $("text").value = "";
  box_changed();
  await answer(text);
}

// Invalid settings are never sent: show the field instead.
function may_send() {
  const invalid = settings.invalid;
  if (!invalid) return fitting().length > 0;
  open_settings();
  invalid.focus();
  return false;
}

function regenerate(turn) {
  if (running || !may_send()) return;
  conversation.turns.length = conversation.turns.indexOf(turn);
  thread.show(conversation);
  answer(turn.asked);
}

// Send a changed message again. What came after it is removed, and can be brought back.
function edit(turn, text) {
  if (running || !may_send()) return;
  const one = conversation, before = one.turns, number = is_chat() ? before.indexOf(turn) : 0;
  const num_later = before.length - number - 1;
  one.turns = before.slice(0, number);
  if (!number && !one.is_named) one.title = title_of(text);
  thread.show(one);
  answer(text);
  if (!is_chat() || !num_later) return;
  toast(`Removed ${num_later === 1 ? "1 later turn" : `${num_later} later turns`}.`, "Undo", () => {
    running?.abort();
    one.turns = before;
    keep(one);
    if (conversation === one) open_conversation(one);
  });
}

// Append a turn with this message to the conversation, and let the model or both models answer.
async function answer(text) {
  const one = conversation, number = one.turns.length, own = running = new AbortController();
  const asked = other ? [model, other] : [model];
  // A reload during the answer leaves this note behind.
  const interrupted = { said: "", end: "The answer was interrupted.", is_failed: true, code: "", stats: null };
  const turn = { asked: text, answers: asked.map((each) => ({ model: each.id, ...interrupted })) };
  one.turns.push(turn);
  const views = thread.add(turn);
  const texts = asked.map((each) => messages_for(one, number, each.id)), values = settings.values();
  keep(one);
  show_list();
  show_state();
  $("log").scrollTop = $("log").scrollHeight;
  await Promise.all(views.map((view, i) => answer_one(asked[i], texts[i], values, own.signal, view)));
  keep(one);
  if (running === own) running = null;
  if (conversation === one) {
    show_state();
    $("spoken").textContent = views.map((view) => (views.length > 1 ? view.answer.model + ": " : "") + (view.answer.said || view.answer.end)).join("\n");
  }
  show_list();
  if (document.activeElement === document.body) focus_box();  // the button that was pressed is gone
  if (turn.answers.some((each) => each.code === "model_not_found")) connect();  // the server has other models now
}

async function answer_one(asked, messages, values, signal, view) {
  const found = view.answer;
  let num_pieces = 0;
  view.begin();
  try {
    const { reason, usage, tokens_per_s } = await generate(asked, messages, values, signal, (piece) => {
      num_pieces += 1;
      view.say(piece, follow);
    });
    const is_full = usage.total_tokens >= asked.context;
    found.is_failed = false;
    found.stats = { num_tokens: usage.completion_tokens, used: usage.total_tokens, tokens_per_s, finish: reason === "length" ? (is_full ? "context full" : "maximum reached") : "complete" };
    found.end = reason !== "length" ? (found.said ? "" : "The model ended the text immediately.")
      : is_full ? "The context is full, so the answer ends here. Start a new conversation to go on."
      : !view.is_chat ? ""  // a text simply goes on with Continue
      : `The answer ends here because it reached the maximum of ${usage.completion_tokens.toLocaleString("en")} tokens. You can raise it in the settings.`;
  } catch (problem) {
    if (is_leaving) return;  // the browser ends the request; what has arrived is kept as interrupted
    const is_stopped = problem.name === "AbortError";
    found.stats = num_pieces ? { num_tokens: num_pieces, is_about: true, tokens_per_s: null, finish: is_stopped ? "stopped" : "incomplete" } : null;
    found.end = is_stopped ? "You stopped this answer." : problem.message;
    found.is_failed = !is_stopped;
    found.code = problem.code || "";
    if (problem.code === "context_length_exceeded") found.end += " Start a new conversation, or shorten the message.";
    if (problem.code === "unauthorized") log_in(problem.message);
  }
  follow(() => view.finish());
}

// -- what depends on the conversation and on whether an answer is being generated --

function show_state() {
  const is_empty = !conversation.turns.length, is_running = Boolean(running), fits = fitting().length > 0;
  document.body.classList.toggle("is-running", is_running);
  $("stop").hidden = !is_running;
  $("send").hidden = is_running;
  $("send").disabled = !fits || !$("text").value.trim();
  $("go-on").hidden = is_running || is_chat() || is_empty;
  $("text").placeholder = is_chat() ? `Message ${model.id}` : is_empty ? "Start a text; the model continues it" : "Add to the text, or let the model continue";
  $("text").setAttribute("aria-label", is_chat() ? "Your message" : "Your text");
  $("system-field").hidden = !is_chat();
  $("num-set").hidden = !settings.num_set;
  $("num-set").textContent = settings.num_set;
  $("num-set").title = "Settings that differ from the server's";
  show_welcome(is_empty && !is_running);
  show_meter();
  show_latest();
}

function show_welcome(is_shown) {
  $("empty").hidden = !is_shown;
  if (!is_shown) return;
  $("empty-title").textContent = is_chat() ? `Chat with ${model.id}` : `Write with ${model.id}`;
  $("empty-text").textContent = is_chat() ? "Your own model, on your own computer. Conversations stay in this browser." : "This is a base model: it continues your text and was not trained for chat. Texts stay in this browser.";
  $("examples").replaceChildren(...EXAMPLES[conversation.mode].map((text) => el("button", { type: "button", class: "example", onclick: () => send(text) }, el("span", {}, text.split("\n")[0]), icon("forward"))));
}

// Of two models that are compared, the one whose context is fuller counts. An answer that failed or was stopped has no
// counts, so those of the newest answer before it are shown.
function context_use() {
  const counted = conversation.turns.findLast((turn) => turn.answers?.some((each) => each.stats?.used));
  const uses = (counted?.answers || []).map((each) => {
    const { context } = models.find((one) => one.id === each.model) || model;
    return { used: each.stats?.used || 0, context, share: Math.min(1, (each.stats?.used || 0) / context) };
  });
  return uses.sort((a, b) => b.share - a.share)[0] || { used: 0, context: model.context, share: 0 };
}

function show_meter() {
  const { used, context, share } = context_use();
  $("meter").hidden = false;
  $("meter-text").textContent = used ? `${in_digits(used)} of ${in_digits(context)} tokens` : `context ${in_digits(context)} tokens`;
  $("meter").title = "How much of the model's context this conversation uses";
  $("meter-bar").style.width = 100 * share + "%";
  $("meter").classList.toggle("is-full", share >= NEARLY_FULL);
  show_notice();
}

const in_digits = (value) => value.toLocaleString("en");

// Above the box, what the person should know before the next message, and the button that helps.
function show_notice() {
  const { used, context, share } = context_use();
  const fullness = `${share >= 1 ? "full" : "nearly full"}: ${in_digits(used)} of ${in_digits(context)} tokens`;
  const [message, action, run] = storage_problem ? [storage_problem, "Export all", export_all]
    : !fitting().length ? ["This is a conversation with a chat model, and this server has only base models.", "New text", start_conversation]
    : share >= NEARLY_FULL ? [`The model's context is ${fullness}. A longer conversation does not fit.`, "New conversation", start_conversation]
    : [];
  $("notice").hidden = !message;
  if (message && $("notice").firstChild?.textContent !== message) {
    $("notice").replaceChildren(el("span", {}, message), el("button", { type: "button", class: "btn-small", onclick: run }, action));
  }
}

// Keep the scroll position if the person has scrolled up; otherwise stay at the end.
const is_at_end = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 48;

function follow(change) {
  const stays = is_at_end();
  change();
  if (stays) $("log").scrollTop = $("log").scrollHeight;
  show_latest();
}

function show_latest() {
  $("latest").hidden = is_at_end();
}

// -- composer --

function box_changed() {
  grow($("text"));
  tab_storage.setItem(DRAFT_KEY, $("text").value);
  $("send").disabled = !$("text").value.trim() || !fitting().length;
}

$("text").addEventListener("input", box_changed);
$("text").addEventListener("keydown", (event) => {
  if (is_send_key(event)) {
    event.preventDefault();
    $("ask").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("text").value && conversation.turns.length) {
    event.preventDefault();
    thread.edit(conversation.turns.at(-1));
  }
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("text").value);
});
$("go-on").addEventListener("click", () => {
  if (running || !may_send()) return;
  const text = $("text").value;
  $("text").value = "";
  box_changed();
  answer(text);
});
$("stop").addEventListener("click", () => {
  running?.abort();
  focus_box();
});
$("latest").addEventListener("click", () => { $("log").scrollTop = $("log").scrollHeight; });
$("log").addEventListener("scroll", show_latest);

// -- models, settings, help, keys --

$("model").addEventListener("change", () => choose_model($("model").value));
$("other").addEventListener("change", () => { other = models.find((each) => each.id === $("other").value); });
$("compare").addEventListener("click", () => {
  other = other ? null : fitting().find((each) => each !== model);
  show_models();
  focus_box();
});

function open_settings() {
  if ($("settings").open) return;
  $("system").value = conversation.system;
  $("settings").showModal();
}

for (const [name, open] of [["settings", open_settings], ["help", () => $("help").showModal()]]) {
  $("open-" + name).addEventListener("click", open);
  $("close-" + name).addEventListener("click", () => $(name).close());
  $(name).addEventListener("click", (event) => { if (event.target === $(name)) $(name).close(); });  // beside it
}
$("system").addEventListener("input", () => {
  conversation.system = $("system").value;
  keep(conversation);
});
$("settings").addEventListener("close", () => {
  const place = $("log").scrollTop;
  if (!running) thread.show(conversation);
  $("log").scrollTop = place;
  show_state();
  show_list();
});
$("reset").addEventListener("click", () => settings.reset());
$("colors").value = document.documentElement.dataset.theme || "";
$("colors").addEventListener("change", () => choose_theme($("colors").value));
document.addEventListener("homing-theme", () => { $("colors").value = document.documentElement.dataset.theme || ""; });
theme_button($("theme"));

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if ($("side").classList.contains("is-open")) close_side();
    else running?.abort();
  }
  if (event.key === "?" && !event.target.closest("input, textarea, select") && !$("app").hidden) $("help").showModal();
});
$("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  use_token($("token").value.trim());
  connect();
});
// The address of a restarted server, opened in the tab of the old one: the browser does not reload the page for that.
addEventListener("hashchange", () => { if (location.hash) connect(); });
// What arrived until the page is closed is kept, too.
addEventListener("pagehide", () => { if (running) keep(conversation); });
addEventListener("beforeunload", () => {
  is_leaving = true;
  setTimeout(() => { is_leaving = false; }, 3000);  // the page may stay after all
});
// Another tab has changed the conversations.
addEventListener("storage", (event) => {
  if (!event.key?.startsWith(CONVERSATION_KEY) || !conversation) return;
  const is_busy = running || $("thread").querySelector("form");  // not while a message is being edited
  const changed = event.key === CONVERSATION_KEY + conversation.id && !is_busy && stored(conversation.id);
  if (changed) open_conversation(changed);
  else show_list();
});
// On some phones the keyboard covers the page instead of making it smaller.
visualViewport?.addEventListener("resize", () => {
  const is_covered = visualViewport.scale === 1 && visualViewport.height < innerHeight - 1;
  document.body.style.height = is_covered ? visualViewport.height + "px" : "";
});
connect();
