// The view of conversations: one is open; in each of them at most one answer arrives, whichever is open.

import { Arrival, emptyAnswer, isEmpty, requestBody } from "./answer.js";
import { Composer } from "./composer.js";
import { button, byId, h, keep, recall } from "./dom.js";
import { showList } from "./list.js";
import { McpServers } from "./mcp.js";
import { problemsOf, settingsForm, showDefaults } from "./settings.js";
import * as store from "./store.js";
import { Thread, showContext } from "./thread.js";
import { branch, showVersion } from "./tree.js";

const SAVE_PAUSE = 1000;  // milliseconds between copies of an answer that arrives; longer if a copy takes long
const OPEN = "quire open";  // of the session: the conversation that a reload shows

export class Chat {
  /** `server`: a `Served`. */
  constructor(server) {
    Object.assign(this, {server, open: store.fresh(), conversations: [], arrivals: new Map(), query: ""});
    this.composer = new Composer(this);
    this.mcp = new McpServers(server.mcp);
    this.thread = new Thread({
      edit: index => this.edit(index),
      regenerate: index => this.regenerate(index),
      continue: index => this.continue(index),
      retry: index => this.retry(index),
      showVersion: (index, at) => this.change(() => showVersion(this.open.messages, index, at)),
      answerCall: (index, id, text) => this.answerCall(index, id, text),
      answered: id => this.open.messages.some(message => message.callId === id),
      canRun: call => this.mcp.has(call.function.name),
      runCall: call => this.mcp.run(call),
      isLast: index => index === this.open.messages.length - 1,
      bodyOf: index => this.bodyOf(index),
    });
    document.addEventListener("keydown", event => { if (event.key === "Escape" && !byId("dialog").open) this.stop(); });
    store.onChange(id => this.changedElsewhere(id));
  }

  async start() {
    let problem = "";
    this.conversations = await store.all().catch(error => { problem = store.storeProblem(error); return []; });
    const id = recall(OPEN, "sessionStorage");
    for (const conversation of this.conversations) this.goOn(conversation);
    this.select(this.conversations.find(one => one.id === id) ?? this.conversations[0] ?? this.open);
    if (problem) this.say(problem);
  }

  /** Say something above the box; with `again`, offer to try it again. */
  say(text, again = null) {
    const retry = again && button("Try again", () => { this.say(""); byId("send").focus(); again(); });
    byId("notice").replaceChildren(...[text, retry].filter(Boolean));
  }

  get busy() { return this.arrivals.has(this.open.id); }
  get model() { return this.server.cards[this.open.settings.model] ? this.open.settings.model : this.server.model; }

  // ---- conversations

  select(conversation) {
    this.open = conversation;
    keep(OPEN, conversation.id, "sessionStorage");
    const {settings: {model}} = conversation;
    this.say(model && !this.server.cards[model] ? `The server no longer has ${model}: ${this.model} answers here now.` : "");
    this.composer.open(conversation.messages.length ? conversation.id : "new");
    this.showSettings();
    this.showAll();
    this.list();
  }

  list() { showList(this); }

  /** Show what is known now of the models. */
  showServer() {
    this.server.choose(this.model);
    showContext(this.open.messages, this.server.cards[this.model].max_model_len);
    this.learn();
  }

  showSettings() {
    byId("settings").replaceChildren(...settingsForm(this));
    this.server.choose(this.model);
    this.learn();
  }

  /** Show the defaults of the model, once they are known. */
  async learn() {
    const {model} = this;
    await this.server.learn(model);
    if (model === this.model) showDefaults(this.server.bounds(model));
  }

  chooseModel(name) {
    if (name === this.server.model) delete this.open.settings.model;
    else this.open.settings.model = name;
    this.showSettings();  // with its limits
    this.showAll(true);
    this.save();
  }

  /** Offer the tools of MCP servers to the model, in the place of those of before. Returns their number. */
  async useMcp(urls) {
    const before = new Set(this.mcp.names), found = await this.mcp.connect(urls), now = new Set(this.mcp.names);
    const given = listed(this.open.settings.tools);
    const own = given.filter(({function: tool}) => !before.has(tool?.name) && !now.has(tool?.name)), tools = [...own, ...found];
    if (tools.length) this.open.settings.tools = JSON.stringify(tools, null, 1);
    else delete this.open.settings.tools;
    this.showSettings();
    this.showAll(true);
    await this.save();
    return this.mcp.count;
  }

  fresh() {
    this.select(store.fresh(this.open.settings, this.open.system));
    byId("input").focus();
  }

  /** Change the open conversation, show and keep it. */
  change(act) {
    act();
    this.showAll(true);
    return this.save();
  }

  /** Keep a conversation in the browser, once it has a message. `touch`: it moves to the top of the list. */
  async save(conversation = this.open, touch = true) {
    if (!conversation.messages.length || conversation.removed) return;
    if (touch) conversation.updated = Date.now();
    if (!conversation.named) conversation.title = titleOf(conversation.messages[0]);
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    if (touch) this.list();
    try {
      await store.put(conversation);
    } catch (error) {
      if (error instanceof store.Conflict) await this.saveCopy(conversation);
      else this.say(store.storeProblem(error));
    }
  }

  /** Another tab has written another state: keep both. */
  async saveCopy(conversation) {
    const mine = conversation.id, theirs = await store.get(mine), arrival = this.arrivals.get(mine);
    Object.assign(conversation, {id: store.newId(), revision: 0, named: true, title: `${conversation.title} (this tab)`});
    if (arrival) this.arrivals.set(conversation.id, arrival).delete(mine);
    if (theirs) this.conversations.push(theirs);
    if (this.open === conversation) {
      keep(OPEN, conversation.id, "sessionStorage");
      this.say("Another tab changed this conversation. Both are kept: this one is a copy now.");
    }
    await this.save(conversation);
    this.list();
  }

  /** Take over an imported conversation. */
  async takeOver(id) {
    await this.changedElsewhere(id);
    const conversation = this.conversations.find(one => one.id === id);
    if (conversation && !this.arrivals.has(id)) this.goOn(conversation);
    if (!this.open.messages.length && conversation) this.select(conversation);
  }

  /** Take over what another tab has written. */
  async changedElsewhere(id) {
    if (this.arrivals.has(id) || (this.open.id === id && this.thread.editing)) return;
    const now = await store.get(id), at = this.conversations.findIndex(one => one.id === id), known = this.conversations[at];
    if (known && (known.revision ?? 0) >= (now?.revision ?? Infinity)) return;
    if (at >= 0) this.conversations.splice(at, 1, ...(now ? [now] : []));
    else if (now) this.conversations.unshift(now);
    store.sorted(this.conversations);
    if (now && this.open.id === id) {
      this.open = now;
      this.showAll(true);
    }
    this.list();
  }

  // ---- messages

  bodyOf(count, onward = false) { return requestBody(this.open, this.model, count, onward); }

  async send() {
    if (this.busy || this.composer.empty || !this.ready()) return;
    const message = {role: "user", ...this.composer.take()};
    await this.ask([message], answer => this.giveBack(message, answer));
  }

  /** Whether the model answers and the settings can be sent; says what cannot. */
  ready() {
    const {server, model} = this, instead = server.whyNoChat(model), [problem] = problemsOf(this.open.settings, server.bounds(model));
    if (instead) {
      this.say(`Nothing was sent: ${model} ${instead} and answers no chat.`);
      return false;
    }
    if (problem) {
      this.say(`Nothing was sent: ${problem.text}`);
      byId("settings").classList.add("shown");
      byId(`setting-${problem.name}`)?.focus();
    }
    return !problem;
  }

  editLast() {
    const last = this.open.messages.findLastIndex(message => message.role === "user");
    if (last >= 0 && !this.busy) this.edit(last);
  }

  /** Edit a message: the other text is another version. That of an answer is kept, that of the person answered. */
  edit(index) {
    if (this.busy) return;
    const {messages} = this.open, message = messages[index];
    const copy = content => { const {versions, ...rest} = message; return {...rest, content}; };
    const keep = text => this.change(() => branch(messages, index, copy(text)));
    const resend = async text => {
      if (!this.ready()) return;
      branch(messages, index, copy(text));
      await this.ask([]);
    };
    this.thread.edit(index, message.role === "assistant" ? [["Save", keep]] : [["Send again", resend]], keep);
  }

  async regenerate(index) {
    if (this.busy || !this.ready()) return;
    const answer = emptyAnswer(), {messages} = this.open;
    const body = this.bodyOf(index);
    branch(messages, index, answer);
    await this.receive(this.open, answer, body);
  }

  /** Let the last answer go on where it ended. */
  async continue(index) {
    if (this.busy || !this.ready()) return;
    const answer = this.open.messages[index], body = this.bodyOf(index + 1, true);
    for (const name of ["finish", "failed", "usage", "timings", "firstMs"]) delete answer[name];
    await this.receive(this.open, Object.assign(answer, {stream: emptyAnswer().stream}), body);
  }

  /** Ask again for an answer that failed: it goes on, or begins anew if it had not begun. */
  retry(index) {
    const answer = this.open.messages[index];
    if (!isEmpty(answer) && !answer.calls && index === this.open.messages.length - 1) return this.continue(index);
    if (this.busy || !this.ready()) return null;
    this.open.messages.splice(index, Infinity, Object.assign(emptyAnswer(), answer.versions && {versions: answer.versions}));
    return this.receive(this.open, this.open.messages[index], this.bodyOf(index));
  }

  async answerCall(index, callId, content) {
    if (this.busy || !this.ready()) return;
    this.open.messages.push({role: "tool", callId, content});
    const calls = this.open.messages.flatMap(message => message.calls ?? []);
    if (calls.every(call => this.thread.actions.answered(call.id))) await this.ask([]);
    else this.change(() => {});
  }

  /** Add messages and the answer to them. `failed(answer)`: called if none arrives. */
  async ask(messages, failed = null) {
    const conversation = this.open, answer = emptyAnswer();
    conversation.messages.push(...messages);
    const body = this.bodyOf();
    conversation.messages.push(answer);
    await this.receive(conversation, answer, body, failed);
  }

  /** A message that was not answered goes back into the box, unless there is another one by now. */
  giveBack(message, answer) {
    const conversation = this.conversations.find(one => one.messages.includes(message)), {messages} = conversation;
    if (this.open !== conversation || !this.composer.empty) return;
    messages.splice(messages.indexOf(message));
    this.composer.id = messages.length ? conversation.id : "new";
    this.composer.fill(message);
    this.composer.keep();
    this.say(answer.failed, () => this.send());
    if (!messages.length) this.forget(conversation);
  }

  /** Take an empty conversation out of the list; it stays open. */
  async forget(conversation) {
    this.conversations = this.conversations.filter(one => one !== conversation);
    conversation.revision = 0;
    await store.remove(conversation.id);
    this.list();
  }

  /** Fill `answer`, the last message of `conversation`. `failed(answer)`: called if none arrives; `show()`: after news. */
  receive(conversation, answer, body, failed = null, show = () => {}) {
    const arrival = this.expect(conversation, answer, body, show);
    return held(answer.stream.name, () => this.arrive(conversation, arrival, failed));
  }

  expect(conversation, answer, body, show = () => {}) {
    const painter = new Painter(() => { show(); if (this.open === conversation) this.thread.showLast(); });
    const arrival = Object.assign(new Arrival(answer, body, () => painter.request()), {painter});
    this.arrivals.set(conversation.id, arrival);
    if (this.open === conversation) {
      this.say("");
      this.composer.id = conversation.id;
      this.showAll(true);
      this.thread.toEnd();
    }
    return arrival;
  }

  async arrive(conversation, arrival, failed) {
    const {answer, body, painter} = arrival;
    if (body) await this.save(conversation);
    const stop = this.saveWhile(conversation);
    await arrival.run();
    stop();
    painter.end();
    this.arrivals.delete(conversation.id);
    if (answer.failed && isEmpty(answer) && failed) failed(answer);
    if (this.open === conversation) this.showAll(true);
    this.server.refresh().then(() => this.showServer(), () => {});  // unreachable: the answer tells it
    await this.save(conversation);
  }

  /** Keep copies of a conversation until the function that is returned is called. */
  saveWhile(conversation) {
    let timer = null, running = true;
    const again = async pause => {
      const started = performance.now();
      if (pause) await this.save(conversation, false);
      if (running) timer = setTimeout(again, Math.max(SAVE_PAUSE, 20 * (performance.now() - started)), true);
    };
    again(false);
    return () => { running = false; clearTimeout(timer); };
  }

  /** Go on with an answer that arrived when the page was left, once no other tab reads it. */
  goOn({id, messages}) {
    const name = messages.at(-1)?.stream?.name;
    return name && held(name, async () => {
      await this.changedElsewhere(id);
      const conversation = this.conversations.find(one => one.id === id), answer = conversation?.messages.at(-1);
      if (answer?.stream?.name !== name || this.arrivals.has(id)) return;
      const message = conversation.messages.at(-2);
      const failed = message?.role === "user" && !answer.versions ? () => this.giveBack(message, answer) : null;
      await this.arrive(conversation, this.expect(conversation, answer, null), failed);
    });
  }

  stop() { this.arrivals.get(this.open.id)?.stop(); }

  // ---- showing

  showAll(keep = false) {
    const {messages} = this.open;
    const instead = this.server.whyNoChat(this.model);
    const welcome = [h("div", {class: "welcome"}, h("p", {}, instead ? `${this.model} ${instead} and answers no chat.` : `Ask ${this.model} something.`),
      h("p", {class: "note"}, "Conversations stay in this browser."))];
    this.thread.show(messages, this.busy, welcome, keep);
    showContext(messages, this.server.cards[this.model]?.max_model_len);
    this.composer.busy(this.busy);
  }
}

function titleOf(message) {
  return message.content.trim().slice(0, 60) || message.files?.[0]?.name || "Images";
}

/** The tools that a setting lists. Throws a sentence for anything else. */
function listed(text) {
  let found = null;
  try {
    found = JSON.parse(text || "[]");
  } catch { /* told below */ }
  if (!Array.isArray(found)) throw new Error("The setting tools is no JSON list: mend or empty it first.");
  return found;
}

/** Run `act` while other tabs see that this one reads stream `name`, if the browser has locks for this page. */
async function held(name, act) {
  let begun = false;
  const run = () => { begun = true; return act(); };
  try {
    return await navigator.locks.request(name, run);
  } catch (error) {
    if (begun) throw error;
    return act();
  }
}

/** Paints after changes, at most for a quarter of the time: long answers take longer to paint. */
class Painter {
  constructor(paint) { this.paint = paint; this.timer = null; this.pause = 30; }

  request() {
    this.timer ??= setTimeout(() => {
      const started = performance.now();
      this.timer = null;
      this.paint();
      this.pause = Math.max(30, 3 * (performance.now() - started));
    }, this.pause);
  }

  end() { clearTimeout(this.timer); }
}
