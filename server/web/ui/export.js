// A conversation as Markdown, and on paper.

import { download } from "./dom.js";

const HEADS = {user: "You", assistant: "Model", tool: "Result of a tool"};
const fence = text => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
const block = (text, language = "") => `${fence(text)}${language}\n${text}\n${fence(text)}`;

/** The shown versions of the messages, with thoughts, calls and files. Images are named, not held. */
export function asMarkdown({title, system, messages}) {
  const parts = [`# ${title}`];
  if (system.trim()) parts.push("## System prompt", system.trim());
  for (const message of messages) {
    parts.push(`## ${HEADS[message.role]}`);
    if (message.images?.length) parts.push(`(${message.images.length} images)`);
    for (const file of message.files ?? []) parts.push(`File ${file.name}:`, block(file.text));
    if (message.reasoning) parts.push(message.reasoning.trim().split("\n").map(line => `> ${line}`).join("\n"));
    if (message.content.trim()) parts.push(message.content.trim());
    for (const call of message.calls ?? []) parts.push(`Call of ${call.function.name}:`, block(call.function.arguments, "json"));
  }
  return `${parts.join("\n\n")}\n`;
}

export function downloadMarkdown(conversation) {
  const name = conversation.title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";
  download(`${name}.md`, asMarkdown(conversation), "text/markdown");
}
