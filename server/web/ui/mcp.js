// Servers of the Model Context Protocol over streamable HTTP, whose tools the model may call. The server of this page
// must allow their origins (--ui-mcp-origins), and they must allow this page's (CORS).

import { keep, recall } from "./dom.js";

const VERSION = "2025-06-18", TIMEOUT = 60_000, STORED = "quire mcp";

export class McpServer {
  constructor(url) { Object.assign(this, {url, session: null, number: 0}); }

  /** Begin a session; returns the tools as those of a chat completion. */
  async connect() {
    this.session = null;
    await this.call("initialize", {protocolVersion: VERSION, capabilities: {}, clientInfo: {name: "quire", version: "1"}});
    await this.post({jsonrpc: "2.0", method: "notifications/initialized"});
    const tools = [];
    for (let cursor; ;) {
      const page = await this.call("tools/list", cursor ? {cursor} : {});
      if (!Array.isArray(page?.tools) || !page.tools.every(tool => typeof tool?.name === "string")) throw this.unreadable();
      tools.push(...page.tools);
      if (!(cursor = page.nextCursor) || tools.length > 1000) break;
    }
    return tools.map(({name, description, inputSchema}) => ({type: "function", function: {name, ...(description && {description}), parameters: inputSchema}}));
  }

  /** The text that a tool answers. */
  async run(name, text) {
    const {content = [], isError, structuredContent} = await this.call("tools/call", {name, arguments: argumentsOf(text)}) ?? {};
    if (!Array.isArray(content)) throw this.unreadable();
    const texts = content.map(part => part?.type === "text" ? part.text : `(${part?.type})`);
    const found = texts.join("\n") || JSON.stringify(structuredContent ?? null);
    return isError ? `Error: ${found}` : found;
  }

  unreadable() { return new Error(`The answer of ${this.url} is no message of the protocol.`); }

  async call(method, params) {
    const id = ++this.number, answer = await this.post({jsonrpc: "2.0", id, method, params}, id);
    if (answer?.error) throw new Error(`${this.url}: ${answer.error.message}`);
    if (!answer) throw new Error(`${this.url} did not answer ${method}.`);
    return answer.result;
  }

  /** Send a message; the answer with `id`, from a JSON body or a stream of events. */
  async post(message, id = null) {
    const headers = {"Content-Type": "application/json", Accept: "application/json, text/event-stream",
      ...(this.session && {"Mcp-Session-Id": this.session, "MCP-Protocol-Version": VERSION})};
    const response = await fetch(this.url, {method: "POST", headers, body: JSON.stringify(message), credentials: "omit", signal: AbortSignal.timeout(TIMEOUT)})
      .catch(() => { throw new Error(`${this.url} cannot be reached, or does not allow this page (CORS).`); });
    if (!response.ok) throw new Error(`${this.url} answered HTTP ${response.status}.`);
    this.session = response.headers.get("Mcp-Session-Id") ?? this.session;
    if (id === null) return null;
    try {
      if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) return await response.json();
      return await answerIn(response.body.pipeThrough(new TextDecoderStream()).getReader(), id);
    } catch (error) {
      throw error instanceof SyntaxError ? this.unreadable() : new Error(`The connection to ${this.url} was lost.`);
    }
  }
}

function argumentsOf(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    throw new Error("The model's arguments are no JSON: nothing was run.");
  }
}

async function answerIn(reader, id) {
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return null;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      const message = line.startsWith("data:") ? JSON.parse(line.slice(5)) : null;
      if (message?.id === id) { reader.cancel(); return message; }
    }
  }
}

/** All servers that the person named. */
export class McpServers {
  /** `origins`: those that the server of this page allows. */
  constructor(origins) {
    this.origins = origins;
    this.owners = new Map();  // tool -> server
  }

  get urls() { return JSON.parse(recall(STORED) ?? "[]"); }
  get names() { return [...this.owners.keys()]; }
  get count() { return this.owners.size; }

  /** Connect to `urls`; returns the tools of all. */
  async connect(urls) {
    const tools = [], refused = urls.find(url => !this.origins.includes(URL.parse(url)?.origin));
    if (refused) throw new Error(`${refused} is at no origin that the server allows: ${this.origins.join(", ")}.`);
    keep(STORED, JSON.stringify(urls));
    this.owners.clear();
    for (const url of urls) {
      const server = new McpServer(url);
      for (const tool of await server.connect()) {
        if (this.owners.has(tool.function.name)) continue;  // the first one named has it
        this.owners.set(tool.function.name, server);
        tools.push(tool);
      }
    }
    return tools;
  }

  has(name) { return this.owners.has(name); }
  run({function: {name, arguments: text}}) { return this.owners.get(name).run(name, text); }
}
