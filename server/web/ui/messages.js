// Messages as nodes.

import { figures } from "./answer.js";
import { button, copyButton, h, showDialog } from "./dom.js";
import { codeBlock, markdown } from "./markdown.js";
import { asCurl, asPython } from "./snippets.js";

const NAMES = {user: "You", assistant: "Model", tool: "Result of a tool"};

/** The node of message `index`. `actions`: edit, regenerate, answerCall, bodyOf; `busy`: an answer arrives. */
export function messageNode(message, index, actions, busy) {
  return h("article", {class: `message ${message.role}`, "data-index": index, "aria-label": NAMES[message.role]},
    h("h3", {}, NAMES[message.role]), contentOf(message, index, actions, busy),
    busy ? null : footer(message, index, actions));
}

function contentOf(message, index, actions, busy) {
  const nodes = [];
  if (message.images?.length) nodes.push(h("div", {class: "images"}, message.images.map(imageOf)));
  if (message.reasoning) nodes.push(thoughts(message, busy));
  if (message.role === "assistant") nodes.push(h("div", {class: "text"}, markdown(message.content)));
  else nodes.push(h("div", {class: "text plain"}, message.content));
  for (const call of message.calls ?? []) nodes.push(callNode(call, index, actions, busy));
  if (busy && !message.content && !message.reasoning && !message.calls) nodes.push(waiting(message.prefill));
  if (message.failed) nodes.push(h("p", {class: "problem", role: "alert"}, message.failed));
  return nodes;
}

function waiting(prefill) {
  if (!prefill) return h("p", {class: "note"}, "Waiting for the first token …");
  const [done, total] = prefill, words = `Reading the prompt: ${done} of ${total} tokens`;
  return h("p", {class: "note"}, words, " ", h("progress", {max: total, value: done, "aria-label": words}));
}

export const imageOf = (url, i) => h("img", {src: url, alt: `attached image ${i + 1}`});

/** Folded; open while nothing but thoughts has arrived. */
function thoughts(message, busy) {
  const open = busy && !message.content;
  return h("details", {class: "thoughts", open}, h("summary", {}, "Thoughts"), markdown(message.reasoning));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {  // arguments that are still arriving, or that are no JSON
    return text;
  }
}

function callNode(call, index, actions, busy) {
  const node = h("details", {class: "call", open: true}, h("summary", {}, `Call of ${call.function.name}`),
    codeBlock(pretty(call.function.arguments), "json"));
  if (busy || actions.answered(call.id)) return node;
  const result = h("textarea", {rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: "What the function returned"});
  node.append(h("div", {class: "row"}, result, button("Send result", () => actions.answerCall(index, call.id, result.value))));
  return node;
}

function footer(message, index, actions) {
  const isAnswer = message.role === "assistant";
  const numbers = isAnswer && figures(message);
  return h("footer", {}, numbers ? h("p", {class: "figures"}, numbers) : null, h("div", {class: "actions"},
    copyButton(() => message.content),
    message.role === "user" && button("Edit", () => actions.edit(index)),
    isAnswer && button("Regenerate", () => actions.regenerate(index)),
    isAnswer && button("Request", () => showRequest(message, actions.bodyOf(index)))));
}

function showRequest(message, body) {
  const answer = {content: message.content, reasoning_content: message.reasoning || undefined, tool_calls: message.calls,
    finish_reason: message.finish, usage: message.usage, error: message.failed};
  const short = JSON.stringify(body, (_, value) => typeof value === "string" && value.startsWith("data:image/") ? `${value.slice(0, 40)}…` : value, 2);
  showDialog("Request and answer",
    h("div", {class: "row"}, copyButton(() => asCurl(body), "Copy as curl"), copyButton(() => asPython(body), "Copy as Python"),
      button("Close", event => event.target.closest("dialog").close(), {class: "last"})),
    h("h3", {}, "Request"), codeBlock(short, "json"), h("h3", {}, "Answer"), codeBlock(JSON.stringify(answer, null, 2), "json"));
}
