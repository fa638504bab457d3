// A message on the page. Its view lives as long as the message is shown: news of an answer change only what they must.

import { button, copyButton, h, setChildren, showDialog } from "./dom.js";
import { figures } from "./figures.js";
import { LiveMarkdown } from "./live.js";
import { logprobsNode } from "./logprobs.js";
import { decorate } from "./rich.js";
import { asCurl, asPython } from "./snippets.js";
import { Code, codeBlock } from "./views.js";

const NAMES = {user: "You", assistant: "Model", tool: "Result of a tool"};

export const imageOf = (url, i) => h("img", {src: url, alt: `attached image ${i + 1}`});

export class MessageView {
  /** `actions`: edit, regenerate, continue, retry, answerCall, answered, bodyOf, showVersion. */
  constructor(message, index, actions) {
    Object.assign(this, {message, index, actions});
    this.heading = h("h3", {}, NAMES[message.role]);
    this.node = h("article", {class: `message ${message.role}`, "data-index": index, "aria-label": NAMES[message.role]}, this.heading);
    this.calls = [];
  }

  /** Show what the message holds now; `busy`: more will come; `idle`: no answer arrives in this conversation. */
  update(busy, idle) {
    const {message} = this, {role} = message;
    const nodes = [this.heading, this.attachments(), this.thoughts(busy), this.text(busy), ...this.callNodes(busy)];
    const none = busy && role === "assistant" && !message.content && !message.reasoning && !message.calls;
    if (none && !message.note) nodes.push(waiting(message.prefill));
    if (message.note) nodes.push(h("p", {class: "note", role: "status"}, message.note));
    if (!busy && message.failed) nodes.push(this.failure(idle));
    if (!busy) nodes.push(this.footer(idle));
    setChildren(this.node, nodes);
  }

  attachments() {
    const {images = [], files = []} = this.message;
    if (!images.length && !files.length) return null;
    return this.attached ??= h("div", {class: "images"}, images.map(imageOf), files.map(fileNode));
  }

  text(busy) {
    const {role, content} = this.message;
    if (role !== "assistant") {
      this.plain ??= h("div", {class: "text plain"});
      if (this.plain.textContent !== content) this.plain.textContent = content;
      return this.plain;
    }
    this.answer ??= new LiveMarkdown({class: "text"}, decorate);
    this.answer.update(content, !busy);
    return this.answer.node;
  }

  /** Folded; open while nothing but thoughts has arrived, unless the person has chosen. */
  thoughts(busy) {
    const {reasoning, content} = this.message;
    if (!reasoning) return null;
    if (!this.thought) {
      this.thought = new LiveMarkdown({}, decorate);
      this.fold = h("details", {class: "thoughts"}, h("summary", {onclick: () => { this.chosen = true; }}, "Thoughts"), this.thought.node);
    }
    this.thought.update(reasoning, !busy);
    if (!this.chosen) this.fold.open = busy && !content;
    return this.fold;
  }

  callNodes(busy) {
    return (this.message.calls ?? []).map((call, i) => (this.calls[i] ??= new CallView(call, this)).update(busy));
  }

  failure(idle) {
    const {message, index, actions} = this;
    return h("p", {class: "problem", role: "alert"}, message.failed, " ", idle && button("Try again", () => actions.retry(index)));
  }

  footer(idle) {
    const {message, index, actions} = this, {role} = message, isAnswer = role === "assistant";
    const numbers = isAnswer && figures(message);
    return h("footer", {}, numbers ? h("p", {class: "figures"}, numbers) : null, h("div", {class: "actions"},
      this.versions(idle),
      copyButton(() => message.content),
      idle && role !== "tool" && button("Edit", () => actions.edit(index)),
      idle && isAnswer && button("Regenerate", () => actions.regenerate(index)),
      idle && isAnswer && actions.isLast(index) && message.content && !message.calls && button("Continue", () => actions.continue(index)),
      isAnswer && message.logprobs?.length > 0 && button("Tokens", () => showDialog("Tokens", closeRow(), logprobsNode(message.logprobs))),
      isAnswer && button("Request", () => showRequest(message, actions.bodyOf(index)))));
  }

  /** Arrows between the versions of this message. */
  versions(idle) {
    const {versions} = this.message;
    if (!versions) return null;
    const {at, tails} = versions, go = to => () => this.actions.showVersion(this.index, to);
    return h("span", {class: "versions", role: "group", "aria-label": "Versions"},
      button("‹", go(at - 1), {"aria-label": "Earlier version", disabled: !idle || at === 0}),
      h("span", {}, `${at + 1} / ${tails.length}`),
      button("›", go(at + 1), {"aria-label": "Later version", disabled: !idle || at === tails.length - 1}));
  }
}

class CallView {
  constructor(call, view) {
    Object.assign(this, {call, view});
    this.arriving = new Code("json");
    this.node = h("details", {class: "call", open: true}, h("summary"));
  }

  update(busy) {
    const {call, view: {actions, index}} = this, text = call.function.arguments;
    this.node.firstChild.textContent = `Call of ${call.function.name}`;
    if (busy) this.arriving.grow(text);
    else this.code ??= codeBlock(pretty(text), "json");
    const wanted = !busy && !actions.answered(call.id), runs = Boolean(actions.canRun?.(call));
    if (wanted && (!this.answer || this.runs !== runs)) {  // servers of tools come and go
      const written = this.answer?.querySelector("textarea").value ?? "";
      Object.assign(this, {runs, answer: answerRow(call, written, (text) => actions.answerCall(index, call.id, text), runs && (() => actions.runCall(call)))});
    }
    setChildren(this.node, [this.node.firstChild, this.code ?? this.arriving.node, wanted && this.answer]);
    return this.node;
  }
}

/** The place for the result of a call, which the person writes or a server of the Model Context Protocol gives. */
function answerRow(call, written, send, run) {
  const result = h("textarea", {rows: 2, value: written, "aria-label": `Result of ${call.function.name}`, placeholder: "What the function returned"});
  const problem = h("p", {class: "problem", role: "alert"});
  const runner = run && button("Run", async () => {
    runner.disabled = true;
    try {
      result.value = await run();
      problem.textContent = "";
    } catch (error) {
      problem.textContent = error.message;
    }
    runner.disabled = false;
  });
  return h("div", {}, h("div", {class: "row"}, result, runner, button("Send result", () => send(result.value))), problem);
}

function waiting(prefill) {
  if (!prefill) return h("p", {class: "note"}, "Waiting for the first token …");
  const [done, total] = prefill, words = `Reading the prompt: ${done} of ${total} tokens`;
  return h("p", {class: "note"}, words, " ", h("progress", {max: total, value: done, "aria-label": words}));
}

export function fileNode({name, text}) {
  return h("details", {class: "file"}, h("summary", {}, `${name} (${text.length.toLocaleString("en")} characters)`), h("pre", {tabindex: "0"}, text));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {  // no JSON
    return text;
  }
}

const closeRow = (...others) => h("div", {class: "row"}, ...others,
  button("Close", event => event.target.closest("dialog").close(), {class: "last"}));

function showRequest(message, body) {
  const answer = {content: message.content, reasoning_content: message.reasoning || undefined, tool_calls: message.calls,
    finish_reason: message.finish, usage: message.usage, timings: message.timings, error: message.failed};
  const short = JSON.stringify(body, (_, value) => typeof value === "string" && value.startsWith("data:image/") ? `${value.slice(0, 40)}…` : value, 2);
  showDialog("Request and answer",
    closeRow(copyButton(() => asCurl(body), "Copy as curl"), copyButton(() => asPython(body), "Copy as Python")),
    h("h3", {}, "Request"), codeBlock(short, "json"), h("h3", {}, "Answer"), codeBlock(JSON.stringify(answer, null, 2), "json"));
}

