"use strict";
// The list of conversations: open, search, rename, delete, export and import. On a narrow window it covers the page.

function show_list() {
  const words = $("search").value.trim(), all = list_conversations();
  const found = all.filter((one) => matches(one, words));
  const groups = new Map();
  for (const one of found) {
    const name = age_of(one);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(list_row(one));
  }
  const parts = [...groups].flatMap(([name, rows]) => [el("h2", { class: "group" }, name), el("ul", {}, ...rows)]);
  const none = all.length ? `No conversation contains “${words}”.` : "Your conversations appear here. They stay in this browser.";
  $("list").replaceChildren(...(parts.length ? parts : [el("p", { class: "muted small none" }, none)]));
  $("export-all").disabled = !all.length;
}

function age_of(one) {
  const days = (new Date().setHours(0, 0, 0, 0) - new Date(one.updated).setHours(0, 0, 0, 0)) / 86_400_000;
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 7 ? "Last 7 days" : "Older";
}

function list_row(one) {
  const title = one.title || "New conversation", is_current = one.id === conversation?.id;
  const row = el("li", { class: "entry" + (is_current ? " is-current" : "") },
    el("button", { type: "button", class: "open", title, "aria-current": is_current ? "true" : null, onclick: () => { close_side(); if (!is_current) open_conversation(one); } }, title),
    el("span", { class: "entry-acts" },
      icon_button("pencil", `Rename “${title}”`, () => rename(one, row)),
      icon_button("download", `Export “${title}”`, () => export_some([one], title)),
      icon_button("trash", `Delete “${title}”`, () => forget(one))));
  return row;
}

function rename(one, row) {
  const box = el("input", { type: "text", "aria-label": "Title", maxlength: "200" });
  box.value = one.title;
  let is_done = false;
  const finish = (is_kept) => {
    if (is_done) return;
    is_done = true;
    const target = one.id === conversation.id ? conversation : one;
    if (is_kept && box.value.trim()) {
      Object.assign(target, { title: box.value.trim(), is_named: true });
      storage_problem = keep_conversation(target);
      show_notice();
    }
    show_list();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(true);
    if (event.key === "Escape") { event.stopPropagation(); finish(false); }
  });
  box.addEventListener("blur", () => finish(true));
  row.replaceChildren(box);
  box.focus();
  box.select();
}

function forget(one) {
  const own = one.id === conversation.id ? conversation : one;
  forgotten.add(own.id);
  forget_conversation(own.id);
  storage_problem = "";
  if (own === conversation) open_conversation(new_conversation(model.mode));
  show_notice();
  show_list();
  toast(`Deleted “${own.title || "New conversation"}”.`, "Undo", () => {
    forgotten.delete(own.id);
    storage_problem = keep_conversation(own);
    open_conversation(own);
  });
  $("list").focus();
}

function export_some(all, name) {
  const { text, count, num_left_out } = export_lines(all);
  if (!count) return toast("Nothing to export: no conversation has an answer yet.");
  download(name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60).toLowerCase() + ".jsonl", text);
  toast(`Exported ${count === 1 ? "1 conversation" : `${count} conversations`}` + (num_left_out ? `; left out ${num_left_out} without an answer.` : "."));
}

const export_all = () => export_some(list_conversations(), `homing ${model.id} conversations`);

async function import_file(file) {
  const { found, problems } = import_lines(await file.text(), model.mode);
  let num_kept = 0;
  for (const one of found) {
    storage_problem = keep_conversation(one);
    if (storage_problem) break;
    num_kept += 1;
  }
  show_notice();
  toast([`Imported ${num_kept === 1 ? "1 conversation" : `${num_kept} conversations`}.`, problems.length ? `${problems.length === 1 ? "1 line" : `${problems.length} lines`} could not be read. ${problems[0]}` : ""].join(" ").trim());
  show_list();
}

$("new").addEventListener("click", () => start_conversation());
$("search").addEventListener("input", show_list);
$("export-all").addEventListener("click", export_all);
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await import_file($("file").files[0]);
  $("file").value = "";
});

function open_side() {
  $("side").classList.add("is-open");
  $("shade").hidden = false;
  $("main").inert = true;
  $("close-side").focus();
}

function close_side() {
  if (!$("side").classList.contains("is-open")) return;
  $("side").classList.remove("is-open");
  $("shade").hidden = true;
  $("main").inert = false;
  $("open-side").focus();
}

$("open-side").addEventListener("click", open_side);
$("close-side").addEventListener("click", close_side);
$("shade").addEventListener("click", close_side);
