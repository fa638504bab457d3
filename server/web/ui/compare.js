// One question to two models, or with two settings, side by side. Each side is kept as a conversation.

import { emptyAnswer, requestBody } from "./answer.js";
import { button, byId, h } from "./dom.js";
import { MessageView } from "./messages.js";
import { problemsOf, settingsFields } from "./settings.js";
import * as store from "./store.js";

const NO_ACTIONS = {answered: () => true, isLast: () => false};

export class Compare {
  constructor(chat) {
    this.chat = chat;
    this.sides = ["Left", "Right"].map(name => new Side(name, chat));
    this.question = h("textarea", {rows: 3, "aria-label": "The question to both", placeholder: "One question to both"});
    this.ask = h("button", {type: "submit", class: "main"}, "Ask both");
    this.stop = button("Stop", () => this.sides.forEach(side => side.stop()), {hidden: true});
    this.problem = h("p", {class: "problem", role: "alert"});
    const form = h("form", {class: "question", onsubmit: event => { event.preventDefault(); this.run(); }}, this.question, h("div", {class: "row end"}, this.stop, this.ask));
    byId("compare").replaceChildren(form, this.problem, h("div", {class: "sides"}, this.sides.map(side => side.node)));
  }

  async run() {
    const content = this.question.value.trim(), problem = this.sides.flatMap(side => side.problems())[0];
    this.problem.textContent = problem ? `Nothing was sent: ${problem.text}` : "";
    if (!content || problem) return;
    this.busy(true);
    await Promise.all(this.sides.map(side => side.answer(content)));
    this.busy(false);
  }

  busy(busy) {
    const focused = document.activeElement;
    this.ask.hidden = busy;
    this.stop.hidden = !busy;
    if (focused === this.ask && busy) this.stop.focus();
    if (focused === this.stop && !busy) this.ask.focus();
  }
}

class Side {
  constructor(name, chat) {
    this.chat = chat;
    this.name = name.toLowerCase();
    this.target = store.fresh(chat.open.settings, chat.open.system);
    const {settings} = this.target;
    const model = h("select", {"aria-label": `Model on the ${this.name}`, onchange: () => { settings.model = model.value; this.showSettings(); }}, chat.server.options());
    model.value = settings.model = chat.model;
    this.place = h("div", {class: "answer", "aria-live": "polite"});
    this.settings = h("details", {});
    this.showSettings();
    this.node = h("section", {class: "card", "aria-label": name}, h("h2", {}, name), model, this.settings, this.place);
  }

  get bounds() { return this.chat.server.bounds(this.target.settings.model); }

  /** Show the settings with the limits of the model. */
  showSettings() {
    this.settings.replaceChildren(h("summary", {}, "Settings"), ...settingsFields(this.target, this.bounds, () => {}, this.name));
  }

  problems() { return problemsOf(this.target.settings, this.bounds); }
  stop() { this.chat.arrivals.get(this.conversation?.id)?.stop(); }

  /** The answer is that of a conversation, so that it goes on after a reload. */
  async answer(content) {
    const {system, settings} = this.target, answer = emptyAnswer();
    const conversation = this.conversation = store.fresh(settings, system);
    Object.assign(conversation, {named: true, title: `${content.slice(0, 40)} (${settings.model})`, messages: [{role: "user", content}]});
    const body = requestBody(conversation, settings.model);
    conversation.messages.push(answer);
    const view = new MessageView(answer, 1, {...NO_ACTIONS, bodyOf: () => body});
    this.place.replaceChildren(view.node);
    view.update(true, false);
    await this.chat.receive(conversation, answer, body, null, () => view.update(true, false));
    view.update(false, false);
  }
}
