"use strict";
// What the pages have in common. Every text is set as textContent, so that nothing a run or a model wrote becomes HTML.

const $ = (id) => document.getElementById(id);

// el("button", { class: "btn", onclick: save }, "Save"): a new element with attributes, event handlers and children.
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A browser can block the storage of a page. The page then works, but forgets everything when it is closed.
class MemoryStorage {
  getItem(key) { return this[key] ?? null; }
  setItem(key, text) { this[key] = String(text); }
  removeItem(key) { delete this[key]; }
}

function usable_storage(name) {
  try {
    window[name].getItem("homing");
    return window[name];
  } catch {
    return new MemoryStorage();
  }
}

const browser_storage = usable_storage("localStorage");
const tab_storage = usable_storage("sessionStorage");

// The token is in the part of the address after #, which browsers do not send. Keep it for this tab only, and remove it
// from the address and the history at once.
function take_token(key) {
  if (location.hash.startsWith("#token=")) {
    tab_storage.setItem(key, location.hash.slice("#token=".length));
    history.replaceState(null, "", location.pathname);
  }
  return tab_storage.getItem(key) || "";
}

// -- color theme: the system's, or the one chosen on the page --

function set_theme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function is_dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// Let the button switch between light and dark, and call `changed` after each switch, also after one by the system.
function theme_button(button, changed = () => {}) {
  const show = () => {
    button.textContent = is_dark() ? "☀" : "☾";
    button.setAttribute("aria-label", is_dark() ? "Use light colors" : "Use dark colors");
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => choose_theme(is_dark() ? "light" : "dark"));
  document.addEventListener("homing-theme", () => { show(); changed(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show(); changed(); });
  show();
}

// Use "light" or "dark" from now on, or what the system prefers ("").
function choose_theme(theme) {
  set_theme(theme);
  if (theme) browser_storage.setItem("homing-theme", theme);
  else browser_storage.removeItem("homing-theme");
  document.dispatchEvent(new Event("homing-theme"));
}

set_theme(browser_storage.getItem("homing-theme"));  // before the first paint, so that the page does not flash

// -- copying --

async function copy_text(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no permission, or the page is not in a secure context
    const area = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function copy_button(text, label = "Copy") {
  const button = el("button", { type: "button", class: "btn-small", "aria-label": label });
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await copy_text(typeof text === "function" ? text() : text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// A message at the bottom of the window, which screen readers speak. With toast("Deleted.", "Undo", restore), it has a
// button and stays longer.
function toast(message, action = "", run = () => {}) {
  document.querySelector(".toast")?.remove();
  const shown = el("div", { class: "toast", role: "status" }, message);
  if (action) shown.append(" ", el("button", { type: "button", class: "btn-small", onclick: () => { shown.remove(); run(); } }, action));
  document.body.append(shown);
  setTimeout(() => shown.remove(), action ? 10_000 : 4000);
}
