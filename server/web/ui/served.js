// The models that the server has, and what each of them does and accepts.

import { getJson, getPrivileged, hasKey } from "./api.js";
import { readBounds } from "./settings.js";

const INSTEAD = {embedding: "makes embeddings", transcription: "turns speech into text"};  // of models without chat

export async function describeServer() {
  const [{data}, openapi, page] = await Promise.all([getJson("v1/models"), getJson("openapi.json"), getJson("ui/page.json")]);
  const info = hasKey() ? null : await getPrivileged("server_info");  // most keys may not read it
  return new Served(data, openapi, info, page.mcp_origins);
}

export class Served {
  constructor(cards, openapi, info, mcp) {
    Object.assign(this, {openapi, info, mcp, choose: () => {}});
    this.read(cards);
    this.model = (cards.find(({id}) => this.whyNoChat(id) === null) ?? cards[0]).id;
  }

  read(cards) { this.cards = Object.fromEntries(cards.map(card => [card.id, card])); }

  /** Read again what is known of models that were loaded since; on a server of one nothing changes. */
  async refresh() {
    if (Object.values(this.cards).some(card => card.status)) this.read((await getJson("v1/models")).data);
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
    return {accepted, reason: this.info?.images?.reason ?? `${id} reads text only`};
  }

  bounds(id) {
    const {cards, openapi, info} = this;
    return readBounds(openapi, info?.sampling_defaults ?? {}, cards[id].max_model_len);
  }
}
