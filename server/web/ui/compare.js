// One question to two models, or with two settings, side by side. Each side is kept as a conversation.

import { Arrival, emptyAnswer, requestBody } from "./answer.js";
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
    this.ask.hidden = busy;
    this.stop.hidden = !busy;
  }
}

class Side {
  constructor(name, chat) {
    this.chat = chat;
    this.target = store.fresh(chat.open.settings, chat.open.system);
    const {cards} = chat.server, {settings} = this.target;
    const model = h("select", {"aria-label": `Model on the ${name.toLowerCase()}`, onchange: () => { settings.model = model.value; }},
      Object.keys(cards).map(id => h("option", {value: id, disabled: chat.server.whyNoChat(id) !== null}, id)));
    model.value = settings.model ??= chat.model;
    this.place = h("div", {class: "answer", "aria-live": "polite"});
    this.node = h("section", {class: "card", "aria-label": name}, h("h2", {}, name), model,
      h("details", {}, h("summary", {}, "Settings"), settingsFields(this.target, chat.server.bounds(settings.model), () => {}, name.toLowerCase())), this.place);
  }

  problems() { return problemsOf(this.target.settings, this.chat.server.bounds(this.target.settings.model)); }
  stop() { this.arrival?.stop(); }

  async answer(content) {
    const {system, settings} = this.target, conversation = store.fresh(settings, system), answer = emptyAnswer();
    conversation.messages.push({role: "user", content});
    const body = requestBody(conversation, settings.model);
    conversation.messages.push(answer);
    Object.assign(conversation, {named: true, title: `${content.slice(0, 40)} (${settings.model})`});
    const view = new MessageView(answer, 1, {...NO_ACTIONS, bodyOf: () => body});
    this.place.replaceChildren(view.node);
    let due = null;
    this.arrival = new Arrival(answer, body, () => { due ??= setTimeout(() => { due = null; view.update(true, false); }, 60); });
    view.update(true, false);
    await this.arrival.run();
    clearTimeout(due);
    view.update(false, false);
    await this.chat.save(conversation);
  }
}
