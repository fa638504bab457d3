// One answer as it arrives: the request, the text, the thoughts, the calls, and how long it took.

import { stream } from "./api.js";
import { requestFields } from "./settings.js";

function wireMessage(message) {
  const images = message.images ?? [];
  const wire = {role: message.role, content: message.content || (message.calls ? null : "")};
  if (images.length) {
    wire.content = [...images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text: message.content}];
  }
  if (message.calls) wire.tool_calls = message.calls;
  if (message.callId) wire.tool_call_id = message.callId;
  return wire;
}

/** The body of the request that continues `conversation` after its first `count` messages. */
export function requestBody(conversation, model, count = conversation.messages.length) {
  const messages = conversation.messages.slice(0, count).filter(message => !message.failed).map(wireMessage);
  if (conversation.system.trim()) messages.unshift({role: "system", content: conversation.system});
  return {model, messages, ...requestFields(conversation.settings), stream: true, return_progress: true,
    stream_options: {include_usage: true, continuous_usage_stats: true}};
}

function addCall(calls, delta) {
  const call = calls[delta.index] ??= {id: "", type: "function", function: {name: "", arguments: ""}};
  if (delta.id) call.id = delta.id;
  call.function.name += delta.function?.name ?? "";
  call.function.arguments += delta.function?.arguments ?? "";
}

function add(answer, event, started) {
  if (event.prefill) {
    answer.prefill = event.prefill;
    return;
  }
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices[0];
  if (!choice) return;
  const {delta} = choice;
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || thought || delta.tool_calls) {
    answer.lastMs = performance.now() - started;
    answer.firstMs ??= answer.lastMs;
  }
  answer.content += delta.content ?? "";
  answer.reasoning += thought;
  for (const call of delta.tool_calls ?? []) addCall(answer.calls ??= [], call);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

/** Fill `answer` from the server, calling `changed()` after each event. Never throws: errors are in `answer.failed`. */
export async function receive(answer, body, signal, changed) {
  const started = performance.now();
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      add(answer, event, started);
      changed();
    }
    if (!answer.finish) answer.failed = "The connection ended before the answer did.";
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else answer.failed = error.message;
  }
  delete answer.prefill;
}

export const emptyAnswer = () => ({role: "assistant", content: "", reasoning: ""});

/** One line of figures, such as "120 tokens, 35.1 tokens/s, first token after 0.12 s, 64 of 80 prompt tokens cached". */
export function figures(answer) {
  const parts = [], {usage} = answer;
  if (usage) {
    const count = usage.completion_tokens, seconds = (answer.lastMs - answer.firstMs) / 1000;
    parts.push(`${count} token${count === 1 ? "" : "s"}`);
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    if (answer.firstMs) parts.push(`first token after ${(answer.firstMs / 1000).toFixed(2)} s`);
    parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  const ends = {length: "ended by the limit of tokens", stopped: "stopped", repetition: "ended by its repetitions"};
  if (ends[answer.finish]) parts.push(ends[answer.finish]);
  return parts.join(", ");
}
