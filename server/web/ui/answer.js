// One answer as it arrives: the request, the text, the thoughts, the calls, and what the server tells of its speed.

import { ApiError, Unreachable, endStream, events, post, resume } from "./api.js";
import { tellLoading } from "./loading.js";
import { requestFields } from "./settings.js";
import { newId } from "./store.js";

const RETRIES = [250, 500, 1000, 2000, 4000, 8000];  // milliseconds before each try to read the rest
const LOADING_PAUSE = 1000;  // milliseconds
const GATEWAY = [502, 503, 504];  // what proxies answer while the server restarts
let leaving = false;  // the page is being left or reloaded: requests fail, and the reload goes on with them
addEventListener("pagehide", () => { leaving = true; });
addEventListener("pageshow", () => { leaving = false; });

const fileText = ({name, text}) => `File ${name}:\n\n${text}`;

function wireMessage(message) {
  const images = message.images ?? [], texts = [...(message.files ?? []).map(fileText), message.content].filter(Boolean);
  const text = texts.join("\n\n");
  const wire = {role: message.role, content: text || (message.calls ? null : "")};
  if (images.length) wire.content = [...images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text}];
  if (message.calls) wire.tool_calls = message.calls;
  if (message.callId) wire.tool_call_id = message.callId;
  return wire;
}

/** The body of the request that continues `conversation` after its first `count` messages; with `onward`, the last
 *  of them is an answer that goes on. */
export function requestBody(conversation, model, count = conversation.messages.length, onward = false) {
  const shown = conversation.messages.slice(0, count).filter((message, i) => !message.failed || (onward && i === count - 1));
  const messages = shown.map(wireMessage);
  if (conversation.system.trim()) messages.unshift({role: "system", content: conversation.system});
  return {model, messages, ...requestFields(conversation.settings), ...(onward && {continue_final_message: true, add_generation_prompt: false}),
    stream: true, return_progress: true, return_timings: true, stream_options: {include_usage: true, continuous_usage_stats: true}};
}

function addCall(calls, delta) {
  const call = calls[delta.index] ??= {id: "", type: "function", function: {name: "", arguments: ""}};
  if (delta.id) call.id = delta.id;
  call.function.name += delta.function?.name ?? "";
  call.function.arguments += delta.function?.arguments ?? "";
}

function addLogprobs(answer, content) {
  const brief = content.map(({token, logprob, top_logprobs: top}) => ({token, logprob, top: top.map(one => ({token: one.token, logprob: one.logprob}))}));
  (answer.logprobs ??= []).push(JSON.stringify(brief));  // texts: the store copies 100,000 objects for a long time
}

function add(answer, event, started) {
  if (event.usage) answer.usage = event.usage;
  if (event.timings) answer.timings = event.timings;
  const choice = event.choices[0];
  if (!choice) return;
  const {delta} = choice;
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || thought || delta.tool_calls) answer.firstMs ??= performance.now() - started;
  answer.content += delta.content ?? "";
  answer.reasoning += thought;
  for (const call of delta.tool_calls ?? []) addCall(answer.calls ??= [], call);
  if (choice.logprobs?.content) addLogprobs(answer, choice.logprobs.content);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

export const emptyAnswer = () => ({role: "assistant", content: "", reasoning: "", stream: {name: newId(), at: 0}});
export const isEmpty = answer => !answer.content && !answer.reasoning && !answer.calls;

/** An answer on its way: `run()` fills `answer` and never throws, errors are in `answer.failed`. Without `body`, it goes
 *  on where it stood when the page was left. */
export class Arrival {
  constructor(answer, body, changed) {
    Object.assign(this, {answer, body, changed, started: performance.now(), stopper: new AbortController()});
    this.posted = body === null;
  }

  stop() {
    if (this.stopper.signal.aborted) return;
    this.stopper.abort();
    endStream(this.answer.stream.name).catch(() => {});  // unreachable, or ended: the server ends it by itself then
  }

  async run() {
    const {answer} = this;
    answer.failed = await this.tryAll();
    if (leaving && answer.failed) return new Promise(() => {});  // the reload goes on
    if (!answer.failed) delete answer.failed;
    for (const name of ["stream", "prefill", "note"]) delete answer[name];
  }

  /** Read to the end, again after lost connections. Returns the sentence of a failure, or null. */
  async tryAll() {
    for (let tries = 0; ; tries++) {
      try {
        const before = this.answer.stream.at;
        if (await this.read()) return null;
        if (this.answer.stream.at > before) tries = 0;
      } catch (error) {
        if (this.stopper.signal.aborted) { this.answer.finish = "stopped"; return null; }
        const mayComeBack = error instanceof Unreachable || (this.posted && GATEWAY.includes(error.status));
        if (!mayComeBack) return this.sentence(error);
        if (!this.posted || leaving) return error.message;
      }
      const lost = this.answer.stream.at === 0 && !isEmpty(this.answer);  // a server that keeps no stream for us
      if (tries >= RETRIES.length || lost) return "The connection ended before the answer did.";
      this.answer.note = "The connection was lost. Trying again …";
      this.changed();
      await this.pause(RETRIES[tries]);
    }
  }

  /** Wait, but no longer than until Stop. */
  pause(milliseconds) {
    return new Promise(resolve => { setTimeout(resolve, milliseconds); this.stopper.signal.addEventListener("abort", resolve); });
  }

  /** Whether the stream was read to its end. */
  async read() {
    const {answer, stopper: {signal}} = this, {stream} = answer;
    const response = await (this.posted ? resume(stream.name, stream.at, signal) : this.post());
    this.posted = true;
    delete answer.note;
    for await (const {id, event, prefill, done} of events(response, signal)) {
      if (done) return true;
      if (prefill) answer.prefill = prefill;
      else { add(answer, event, this.started); stream.at = id; }
      this.changed();
    }
    return false;
  }

  async post() {
    const {answer, body, stopper} = this;
    const over = tellLoading(body.model, words => { answer.note = words; this.changed(); });
    try {
      for (;;) {
        try {
          return await post("v1/chat/completions", body, answer.stream.name, stopper.signal);
        } catch (error) {
          if (error.body?.error?.code !== "model_loading") throw error;
          answer.note = error.message;
        }
        this.changed();
        await this.pause(LOADING_PAUSE);
        stopper.signal.throwIfAborted();
      }
    } finally {
      over();
    }
  }

  sentence(error) {
    const gone = error instanceof ApiError && error.status === 404 && this.posted && error.body?.error?.param !== "model";
    if (gone) return this.answer.finish ? null : "The connection ended, and the server no longer has the rest of the answer.";
    return error.message;
  }
}
