"use strict";
// Markdown of a model -> elements. The text is untrusted: every part of it becomes a text node, never HTML, and only
// http, https and mailto addresses become links. The work grows in proportion to the text, whatever it contains:
// nesting is limited, and no search for an end is repeated.
//
//   const view = new MarkdownView(container);
//   view.show(text_so_far, true);    as often as wanted: only the last block is rendered again
//   view.show(whole_text, false);

const MOST_LEVELS = 8;  // of nested lists and quotes; what is deeper is shown as plain text
const MOST_COLUMNS = 40;
const MOST_OPEN = 16;    // delimiters of emphasis that wait for their ends
const LONGEST_RUN = 32;  // of backticks
const LONGEST_URL = 1000;

class MarkdownView {
  constructor(container) {
    this.container = container;
    container.classList.add("markdown");
    this.clear();
  }

  clear() {
    this.container.replaceChildren();
    this.start = 0;     // everything before this place is rendered and final
    this.shown = "";
    this.last = [];     // the elements of the last block, which may still change
  }

  show(text, is_growing) {
    if (!text.startsWith(this.shown.slice(0, this.start))) this.clear();
    this.shown = text;
    for (const node of this.last) node.remove();
    this.last = [];
    const lines = text.slice(this.start).split("\n");
    // The last line may still grow, so a block is final only when a whole line with text follows it.
    let whole = lines.length - 2;
    while (whole >= 0 && !lines[whole].trim()) whole--;
    for (let line = 0; line < lines.length;) {
      let found = next_block(lines, line, 0, is_growing);
      const is_final = found.end <= whole;
      if (is_final) {
        if (is_growing) found = next_block(lines, line, 0, false);
        for (let i = line; i < found.end; i++) this.start += lines[i].length + 1;
      } else if (found.node) {
        this.last.push(found.node);
      }
      if (found.node) this.container.append(found.node);
      line = found.end;
    }
  }
}

// A function call has room for a limited number of arguments, and a block may have more children than that.
function fill(node, children) {
  for (const child of children) node.append(child);
  return node;
}

// A block whose text runs in its own direction. That is set last, because with each child the browser would look again.
function block(tag, children, name = null) {
  const node = fill(el(tag, { class: name }), children);
  node.dir = "auto";
  return node;
}

// -- blocks: next_block returns the element that begins at a line, or null for empty lines, and the line after it --

function blocks(lines, level, is_growing) {
  const found = [];
  for (let line = 0; line < lines.length;) {
    const { node, end } = next_block(lines, line, level, is_growing);
    if (node) found.push(node);
    line = end;
  }
  return found;
}

function next_block(lines, at, level, is_growing) {
  const line = lines[at];
  if (!line.trim()) {
    let end = at + 1;
    while (end < lines.length && !lines[end].trim()) end++;
    return { node: null, end };
  }
  const fence = /^ {0,3}(`{3,}|~{3,})([^`]*)$/.exec(line);
  if (fence) return code_block(lines, at, fence);
  const heading = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/.exec(line);
  if (heading) {
    // The page has its own first two levels, so those of a model begin below them.
    const text = (heading[2] || "").trimEnd().replace(/[ \t]#+$/, "");
    const tag = "h" + Math.min(6, heading[1].length + 2);
    return { node: block(tag, inline(text, is_growing)), end: at + 1 };
  }
  if (is_rule(line)) return { node: el("hr"), end: at + 1 };
  if (level < MOST_LEVELS) {
    if (/^ {0,3}>/.test(line)) return quote(lines, at, level, is_growing);
    if (list_mark(line)) return list(lines, at, level, is_growing);
  }
  return table(lines, at, is_growing) || paragraph(lines, at, level, is_growing);
}

const is_rule = (line) => line.length < 200 && /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/.test(line);

function list_mark(line) {
  const found = /^( {0,11})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/.exec(line);
  return found && !is_rule(line) ? { indent: found[1].length, mark: found[2], width: Math.min(found[0].length, found[1].length + found[2].length + 4) } : null;
}

const indent_of = (line) => /^ */.exec(line)[0].length;
const strip = (line, most) => line.slice(Math.min(most, indent_of(line)));

function begins_block(line) {
  return /^ {0,3}(?:`{3}|~{3}|>|#{1,6}(?:[ \t]|$))/.test(line) || is_rule(line) || Boolean(list_mark(line));
}

function code_block(lines, at, fence) {
  const indent = indent_of(lines[at]), end_mark = fence[1];
  let end = at + 1;
  const is_end = (line) => /^ {0,3}(`{3,}|~{3,})[ \t]*$/.test(line) && line.trim().startsWith(end_mark);
  while (end < lines.length && !is_end(lines[end])) end++;
  const code = lines.slice(at + 1, end).map((line) => strip(line, indent)).join("\n");
  const language = fence[2].trim().split(/\s/)[0].slice(0, 30);
  const node = el("div", { class: "code" },
    el("div", { class: "code-head" }, el("span", { class: "code-language" }, language || "text"), copy_button(code, "Copy code")),
    el("pre", { tabindex: "0", dir: "ltr" }, fill(el("code"), plain(code))));
  return { node, end: Math.min(end + 1, lines.length) };
}

function quote(lines, at, level, is_growing) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end++) {
    const mark = /^ {0,3}> ?/.exec(lines[end]);
    if (mark) inner.push(lines[end].slice(mark[0].length));
    else if (lines[end].trim() && inner.at(-1).trim() && !begins_block(lines[end])) inner.push(lines[end]);  // goes on lazily
    else break;
  }
  return { node: block("blockquote", blocks(inner, level + 1, is_growing)), end };
}

function list(lines, at, level, is_growing) {
  const first = list_mark(lines[at]), is_numbered = /\d/.test(first.mark);
  const items = [];
  let item = null, is_loose = false, end = at;
  for (; end < lines.length; end++) {
    const line = lines[end].replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")), mark = list_mark(line);
    const has_gap = item && item.length > 0 && !item.at(-1).trim();
    if (!line.trim()) {
      item.push("");
    } else if (mark && mark.indent < first.indent + 2) {
      if (/\d/.test(mark.mark) !== is_numbered || mark.mark.at(-1) !== first.mark.at(-1)) break;
      if (has_gap) is_loose = true;
      items.push(item = [line.slice(mark.width)]);
    } else if (indent_of(line) >= first.indent + 2) {
      if (has_gap && !mark) is_loose = true;
      item.push(strip(line, first.width));
    } else if (!has_gap && !begins_block(line)) {
      item.push(line);
    } else {
      break;
    }
  }
  while (end > at + 1 && !lines[end - 1].trim()) end--;
  const number = parseInt(first.mark, 10);
  const found = items.map((own) => {
    const task = /^\[([ xX])\] /.exec(own[0]);
    if (task) own[0] = (task[1] === " " ? "☐ " : "☑ ") + own[0].slice(4);
    while (own.length > 1 && !own.at(-1).trim()) own.pop();
    // In a list without empty lines, the text of an item is not a paragraph of its own.
    const is_line = !is_loose && own.length === 1 && !begins_block(own[0]);
    const parts = is_line ? inline(own[0].trim(), is_growing) : blocks(own, level + 1, is_growing);
    const unwrapped = is_loose ? parts : parts.flatMap((part) => part.tagName === "P" ? [...part.childNodes] : [part]);
    return fill(el("li"), unwrapped);
  });
  const node = block(is_numbered ? "ol" : "ul", found);
  if (is_numbered && number !== 1) node.setAttribute("start", number);
  return { node, end: Math.min(lines.length, end) };
}

function cells(line) {
  const found = [];
  let cell = "", is_code = false;
  for (let i = 0; i < line.length; i++) {
    if (line[i] === "\\" && line[i + 1] === "|") { cell += "|"; i++; }
    else if (line[i] === "|" && !is_code) { found.push(cell.trim()); cell = ""; }
    else { if (line[i] === "`") is_code = !is_code; cell += line[i]; }
  }
  found.push(cell.trim());
  if (!found[0]) found.shift();
  if (found.length && !found.at(-1)) found.pop();
  return found;
}

function may_be_table(lines, at) {
  return at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].includes("-") && /^[ \t|:-]+$/.test(lines[at + 1]);
}

function table(lines, at, is_growing) {
  if (!may_be_table(lines, at)) return null;
  const head = cells(lines[at]), marks = cells(lines[at + 1]);
  if (head.length > MOST_COLUMNS || head.length !== marks.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const sides = marks.map((mark) => mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left");
  const row = (tag, own) => el("tr", {}, ...sides.map((side, i) => block(tag, inline(own[i] || "", is_growing), "to-" + side)));
  const body = el("tbody");
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end++) body.append(row("td", cells(lines[end])));
  const node = el("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, el("thead", {}, row("th", head)), body));
  return { node, end };
}

function paragraph(lines, at, level, is_growing) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && (level >= MOST_LEVELS || !begins_block(lines[end]) && !may_be_table(lines, end))) end++;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return { node: block("p", inline(text.trimEnd(), is_growing)), end };
}

// -- inside a block: code, links, emphasis. First a list of parts, then delimiters are paired as in CommonMark --

const PUNCTUATION = /[\p{P}\p{S}]/u;
const TAGS = { "*": ["em", "strong"], "_": ["em", "strong"], "~": ["s", "s"] };

function inline(text, is_growing, may_link = true) {
  if (!/[\\`*_~[<]|https?:|mailto:/i.test(text)) return plain(text);
  const parts = [];  // strings, elements, and delimiters { mark, count, can_open, can_close }
  const no_code_end = new Set();  // lengths of backtick runs that are never closed from here on
  let brackets = null, held = "";
  const flush = () => { if (held) parts.push(held); held = ""; };
  for (let i = 0; i < text.length;) {
    const char = text[i];
    if (char === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1]) && text.charCodeAt(i + 1) < 128) {
      held += text[i + 1];
      i += 2;
    } else if (char === "`") {
      const length = run_length(text, i);
      const end = no_code_end.has(length) || length > LONGEST_RUN ? -1 : code_end(text, i + length, length);
      if (end < 0) {
        no_code_end.add(length);
        held += text.slice(i, i + length);
        i += length;
      } else {
        flush();
        parts.push(fill(el("code"), plain(text.slice(i + length, end).replace(/^ (.*[^ ].*) $/s, "$1"))));
        i = end + length;
      }
    } else if (may_link && (char === "[" || (char === "!" && text[i + 1] === "["))) {
      brackets = brackets || pair_brackets(text);
      const open = char === "!" ? i + 1 : i;
      const found = link(text, open, brackets.get(open));
      if (found) {
        flush();
        parts.push(anchor(found.url, inline(found.label || found.url, false, false)));
        i = found.end;
      } else {
        held += char;
        i += 1;
      }
    } else if (may_link && (char === "h" || char === "<") && address_at(text, i)) {
      const found = address_at(text, i);
      flush();
      parts.push(anchor(found.url, plain(found.url)));
      i = found.end;
    } else if (char === "<" && /^<br ?\/?>/i.test(text.slice(i, i + 6))) {
      flush();
      parts.push(el("br"));
      i = text.indexOf(">", i) + 1;
    } else if (TAGS[char]) {
      const count = run_length(text, i);
      flush();
      parts.push(delimiter(text, i, count));
      i += count;
    } else {
      held += char;
      i += 1;
    }
  }
  flush();
  if (is_growing) close_open_ends(parts);
  return pair(parts);
}

function run_length(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function code_end(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0;) {
    const own = run_length(text, at);
    if (own === length) return at;
    at = text.indexOf("`", at + own);
  }
  return -1;
}

function pair_brackets(text) {
  const open = [], found = new Map();
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "[") open.push(i);
    else if (text[i] === "]" && open.length) found.set(open.pop(), i);
  }
  return found;
}

function link(text, open, close) {
  if (close === undefined || text[close + 1] !== "(" || close - open > LONGEST_URL) return null;
  const found = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)?)>?(?:\s+"[^"]*")?\s*\)/.exec(text.slice(close + 1, close + LONGEST_URL));
  const url = found && safe_url(found[1]);
  return url ? { url, label: text.slice(open + 1, close), end: close + 1 + found[0].length } : null;
}

function safe_url(text) {
  if (!/^(https?:\/\/|mailto:)/i.test(text)) return null;
  try { return ["http:", "https:", "mailto:"].includes(new URL(text).protocol) ? text : null; } catch { return null; }
}

function address_at(text, at) {
  const is_marked = text[at] === "<", start = is_marked ? at + 1 : at;
  if (!/^https?:\/\/|^mailto:/i.test(text.slice(start, start + 8))) return null;
  let [url] = /^[^\s<>"`|\\^{}]*/.exec(text.slice(start, start + LONGEST_URL));
  if (!is_marked) {
    while (url && ".,;:!?'*_~]".includes(url.at(-1))) url = url.slice(0, -1);
    if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
  } else if (text[start + url.length] !== ">") {
    return null;
  }
  return safe_url(url) && url.length > 9 ? { url, end: start + url.length + (is_marked ? 1 : 0) } : null;
}

function anchor(url, children) {
  return fill(el("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank", title: url }), children);
}

function delimiter(text, at, count) {
  const mark = text[at], before = text[at - 1] || " ", after = text[at + count] || " ";
  const is_space = (char) => /\s/.test(char), is_mark = (char) => PUNCTUATION.test(char);
  const opens = !is_space(after) && (!is_mark(after) || is_space(before) || is_mark(before));
  const is_known = mark === "~" ? count === 2 : count <= 3;
  const closes = !is_space(before) && (!is_mark(before) || is_space(after) || is_mark(after));
  return {
    mark, count,
    can_open: is_known && opens && (mark !== "_" || !closes || is_mark(before)),
    can_close: is_known && closes && (mark !== "_" || !opens || is_mark(after)),
  };
}

// While a text grows, emphasis that is open at its end is shown as if it ended there, instead of flickering.
function close_open_ends(parts) {
  const open = [];
  for (const part of parts) {
    if (!part.mark) continue;
    const at = part.can_close ? open.findLastIndex((each) => each.mark === part.mark && each.count === part.count) : -1;
    if (at >= 0) open.length = at;
    else if (part.can_open && !part.can_close) open.push(part);
    if (open.length > 4) return;
  }
  for (const part of open.reverse()) parts.push({ ...part, can_open: false, can_close: true });
}

// Pairs delimiters from left to right: each closer takes the nearest opener of its kind, and what lies between becomes
// its children. Only the newest openers wait for an end, which limits both the search and the nesting.
function pair(parts) {
  const out = [];   // finished nodes and strings, and delimiters that may still open
  const open = [];  // the places of the latter in `out`
  const literal = (part) => part.mark ? part.mark.repeat(part.count) : part;
  for (const part of parts) {
    if (!part.mark) { out.push(part); continue; }
    let left = part.count;
    while (part.can_close && left) {
      const i = open.findLastIndex((place) => out[place].mark === part.mark);
      if (i < 0) break;
      const opener = out[open[i]], size = part.mark === "~" || (opener.count >= 2 && left >= 2) ? 2 : 1;
      const inner = out.splice(open[i] + 1).map(literal);
      open.length = i + 1;
      opener.count -= size;
      left -= size;
      if (!opener.count) { out.pop(); open.pop(); }
      out.push(fill(el(TAGS[part.mark][size - 1]), as_nodes(inner)));
    }
    if (left && part.can_open) {
      if (open.length === MOST_OPEN) { const oldest = open.shift(); out[oldest] = literal(out[oldest]); }
      open.push(out.length);
      out.push({ ...part, count: left });
    } else if (left) {
      out.push(part.mark.repeat(left));
    }
  }
  return as_nodes(out.map(literal));
}

// Join strings that follow each other, and make them text.
function as_nodes(parts) {
  const found = [];
  let held = "";
  for (const part of parts) {
    if (typeof part === "string") held += part;
    else {
      if (held) for (const each of plain(held)) found.push(each);
      held = "";
      found.push(part);
    }
  }
  if (held) for (const each of plain(held)) found.push(each);
  return found;
}

// Text as text. Characters that would show the rest of a line in another order are made visible instead.
function plain(text) {
  if (!/[\u202d\u202e]/.test(text)) return [text];
  return text.split(/([\u202d\u202e])/).filter(Boolean).map((part) => /^[\u202d\u202e]$/.test(part)
    ? el("span", { class: "control-character", title: "An invisible character that reverses text" }, "U+" + part.charCodeAt(0).toString(16).toUpperCase())
    : part);
}
