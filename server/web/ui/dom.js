// Building nodes. Text becomes text nodes only: nothing on this page is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element with attributes, listeners (`onclick` ...) and children (nodes or text). */
export function h(name, properties = {}, ...children) {
  return fill(document.createElement(name), properties, children);
}

export function svg(name, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

/** Texts that the browser keeps for this page; `storage` may be that of the session. Browsers that keep nothing for a
 *  page (cookies are blocked) throw at each use. */
export function recall(name, storage = "localStorage") {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

export function keep(name, text, storage = "localStorage") {
  try {
    window[storage].setItem(name, text);
  } catch { /* it is not kept */ }
}

export const byId = id => document.getElementById(id);

export function button(label, onclick, properties = {}) {
  return h("button", {type: "button", onclick, ...properties}, label);
}

/** A button that copies `text(event)` and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const node = button(label, async event => {
    node.textContent = (await copy(text(event))) ? "Copied" : "Not allowed";
    setTimeout(() => { node.textContent = label; }, 1500);
  });
  return node;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // no clipboard: the page came over plain http from another machine
    const area = h("textarea", {value: text, class: "away", "aria-hidden": "true"});
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Show `content` in the page's dialog; resolves when it is closed. */
export function showDialog(title, ...content) {
  const dialog = byId("dialog");
  dialog.replaceChildren(h("h2", {id: "dialog-title"}, title), ...content);
  if (!dialog.open) dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", resolve, {once: true}));
}

/** The files that the user chooses; with `capture` a phone offers its camera. */
export function chooseFiles(accept, multiple = false, capture = null) {
  return new Promise(resolve => {
    const input = h("input", {type: "file", accept, multiple, capture});
    input.addEventListener("change", () => resolve([...input.files]));
    input.addEventListener("cancel", () => resolve([]));
    input.click();
  });
}

export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], {type}));
  h("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Make `nodes` the children of `parent`. Those that are there already keep their state: focus, selection, scrolling. */
export function setChildren(parent, nodes) {
  const wanted = nodes.filter(Boolean), kept = new Set(wanted);
  for (const child of [...parent.childNodes]) if (!kept.has(child)) child.remove();
  wanted.forEach((node, i) => { if (parent.childNodes[i] !== node) parent.insertBefore(node, parent.childNodes[i] ?? null); });
}

/** Whether a key sends what is written. The Enter that ends a composition (of Japanese, say) does not; Safari tells that by
 *  the key's code only. */
export const isSent = event => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
