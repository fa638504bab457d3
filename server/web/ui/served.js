// The models that the server has, and what each of them does and accepts.

import { Unreadable, getJson, getPrivileged, hasKey } from "./api.js";
import { h } from "./dom.js";
import { readBounds } from "./settings.js";

const INSTEAD = {embedding: "makes embeddings", transcription: "turns speech into text"};  // of models without chat

export async function describeServer() {
  const [{data}, openapi, page] = await Promise.all([getJson("v1/models"), getJson("openapi.json"), getJson("ui/page.json")]);
  if (!Array.isArray(data)) throw new Unreadable("v1/models");
  if (!openapi?.components?.schemas?.ChatCompletionRequest) throw new Unreadable("openapi.json");
  if (!data.length) throw new Error("The server has no model.");
  const info = hasKey() ? null : await getPrivileged("server_info");  // most keys may not read it
  return new Served(data, openapi, info, page.mcp_origins ?? []);
}

export class Served {
  constructor(cards, openapi, info, mcp) {
    Object.assign(this, {openapi, info, mcp, choose: () => {}, defaults: {}});  // `defaults`: of settings, by model
    this.read(cards);
  }

  read(cards) {
    this.cards = Object.fromEntries(cards.map(card => [card.id, card]));
    if (!this.cards[this.model]) this.model = (cards.find(({id}) => this.whyNoChat(id) === null) ?? cards[0]).id;
  }

  /** Read again which models and adapters there are, and what is known of those that were loaded since. */
  async refresh() {
    const {data} = await getJson("v1/models", false);
    if (data?.length) this.read(data);
  }

  get areSeveral() { return Object.values(this.cards).some(card => card.status); }

  /** Read the defaults of a model, if that loads none. */
  async learn(id) {
    const {status} = this.cards[id];
    if (this.defaults[id] || (status && status.value !== "loaded")) return;
    const path = `props?model=${encodeURIComponent(id)}`;
    this.defaults[id] = (await getJson(path, false).catch(() => null))?.default_generation_settings?.params;  // a key may not read them
  }

  /** The options of a chooser of models. */
  options() {
    const label = ({id, parent}) => parent && parent !== id ? `${id} (adapter of ${parent})` : [id, this.whyNoChat(id)].filter(Boolean).join(": ");
    return Object.values(this.cards).map(card => h("option", {value: card.id, disabled: this.whyNoChat(card.id) !== null}, label(card)));
  }

  /** What a model does instead of answering, or null. A model that was never loaded may do anything. */
  whyNoChat(id) {
    const {capabilities} = this.cards[id];
    if (!capabilities.length || capabilities.includes("completion")) return null;
    return INSTEAD[capabilities[0]] ?? "writes no text";
  }

  /** The model that turns speech into text while `id` answers, or null. */
  hears(id) {
    return [this.cards[id], ...Object.values(this.cards)].find(card => card.capabilities.includes("transcription"))?.id ?? null;
  }

  /** {accepted, reason} of images. */
  images(id) {
    const {capabilities} = this.cards[id], accepted = !capabilities.length || capabilities.includes("vision");
    return {accepted, reason: (!this.areSeveral && this.info?.images?.reason) || `${id} reads text only`};
  }

  bounds(id) {
    return readBounds(this.openapi, this.defaults[id], this.cards[id].max_model_len);
  }
}
