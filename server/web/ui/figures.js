// What the server tells of an answer, in words.

const NEAR = 0.85;  // of the context, from where on the page warns
const number = value => value.toLocaleString("en");
const rate = value => value >= 100 ? number(Math.round(value)) : value.toFixed(1);

/** One line, such as "120 tokens, 35.1 tokens/s, prompt 820 tokens/s, first token after 0.12 s, 64 of 80 prompt tokens
 *  cached". The speeds are the server's. */
export function figures(answer) {
  const parts = [], {usage, timings} = answer;
  if (usage) {
    const count = usage.completion_tokens;
    parts.push(`${number(count)} token${count === 1 ? "" : "s"}`);
    if (timings?.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} tokens/s`);
    if (timings?.prompt_per_second) parts.push(`prompt ${rate(timings.prompt_per_second)} tokens/s`);
    if (answer.firstMs) parts.push(`first token after ${(answer.firstMs / 1000).toFixed(2)} s`);
    parts.push(`${number(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${number(usage.prompt_tokens)} prompt tokens cached`);
    if (timings?.draft_n) parts.push(`${number(timings.draft_n_accepted)} of ${number(timings.draft_n)} drafts accepted`);
  }
  const ends = {length: "ended by the limit of tokens", stopped: "stopped", repetition: "ended by its repetitions", abort: "ended by the server"};
  if (ends[answer.finish]) parts.push(ends[answer.finish]);
  return parts.join(", ");
}

/** How much of the context the conversation fills: {used, limit, words, near}, or null before the first answer. */
export function context(messages, limit) {
  const usage = messages.findLast(message => message.usage)?.usage;
  if (!usage || !limit) return null;
  const used = usage.prompt_tokens + usage.completion_tokens, near = used >= NEAR * limit;
  const words = `${number(used)} of ${number(limit)} tokens of context`;
  return {used, limit, near, words: near ? `${words}: the next answers may be cut off; start a new conversation or shorten this one` : words};
}
