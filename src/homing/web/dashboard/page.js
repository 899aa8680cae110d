"use strict";
// What is shown, and the stream that keeps it up to date: #  all runs, #run=RUN  one, #compare=RUN,RUN  several.

const TOKEN = "homing-dashboard-token";
const VIEWS = { all: runs_table, compare: comparison, one: one_run };
let token = "", stream = null, view = "";
let silence_s = 30;  // three times the server's longest silence; after that, even an open connection counts as dead

function link(is_on, text) {
  $("link").className = is_on ? "on" : "off";
  if ($("link").textContent !== text) $("link").textContent = text;
}

// --- the stream: everything first, then what is new ---

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await within(silence_s, reader.read(), () => reader.cancel());
    if (done) return;
    held += value;
    if (!value.includes("\n")) continue;  // splitting a long part again for each of its pieces would take too long
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
      if (!(error instanceof TypeError) && error.message !== "silence") console.error(error);  // not the network's
    }
    link(false, "not connected: is homing dashboard still running?");
    await new Promise((done) => setTimeout(done, wait_s * 1000));
  }
}

const failures = {};
function show_failure(name, text) {
  failures[name] = text;
  const said = Object.values(failures).filter(Boolean);
  if (said.length) link(false, said.join(" "));
  else link(true, "live");
}

// --- the token ---

function ask_token(refusal) {
  link(false, "not connected");
  for (const id of Object.keys(VIEWS)) $(id).hidden = true;
  $("refusal").textContent = token ? refusal : "";
  $("login").hidden = false;
  $("token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  tab_storage.setItem(TOKEN, $("token").value.trim());
  open();
});

// --- choosing between the table, one run and a comparison ---

function open() {
  token = take_token(TOKEN);
  const wanted = new URLSearchParams(location.hash.slice(1));
  const compared = (wanted.get("compare") || "").split(",").filter(Boolean), run = wanted.get("run") || "";
  if (stream) stream.abort();
  stream = new AbortController();
  view = compared.length ? "compare" : run ? "one" : "all";
  $("login").hidden = true;
  if (!token) return ask_token("");
  // With such a header, fetch would throw an error, even after a reload.
  if (!/^[\x21-\x7e]+$/.test(token)) return ask_token("The token has invalid characters.");
  for (const id of Object.keys(VIEWS)) $(id).hidden = id !== view;
  fill($("where"), view === "all" ? "" : el("a", { href: "#", id: "back" }, "All runs"));
  for (const each of [comparison, one_run]) each.close();
  let path = "api/runs/live";
  if (view === "compare") path = comparison.open(compared, wanted);
  else if (view === "one") path = one_run.open(run, wanted);
  else { runs_table.build(); if (runs_table.money) runs_table.show_money(); }
  const shown_view = VIEWS[view];
  follow(path, (part) => shown_view.take(part), stream);
}

addEventListener("hashchange", () => { open(); scrollTo(0, 0); });
$("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });

// The charts draw on canvases, which do not follow the colors of the page by themselves.
const redraw = () => VIEWS[view]?.board?.draw();
$("theme").value = document.documentElement.dataset.theme || "";
$("theme").addEventListener("change", () => choose_theme($("theme").value));
document.addEventListener("homing-theme", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
open();
