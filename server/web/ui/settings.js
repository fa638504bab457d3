// The settings of a conversation: fields of a chat completion with the bounds of the server's OpenAPI document and the
// defaults of the model.

import { button, h } from "./dom.js";
import { openEditor } from "./editors.js";
import { presetRow } from "./presets.js";

const NUMBERS = {
  temperature: {words: "0 always takes the likeliest token"},
  top_p: {words: "the likeliest tokens that add up to this"},
  top_k: {words: "the likeliest tokens; 0 is all"},
  min_p: {words: "at least this part of the likeliest"},
  max_tokens: {words: "of an answer"},
  repetition_penalty: {words: "1 is none"},
  presence_penalty: {words: "for tokens that occurred"},
  frequency_penalty: {words: "by how often they occurred"},
  seed: {words: "the same seed gives the same answer"},
};
const LOGPROBS = "top_logprobs";
NUMBERS[LOGPROBS] = {words: "alternatives of each token, which Tokens below the answer shows"};
const JSON_FIELDS = {
  tools: {words: "functions that the model may call: a JSON list", rows: 4},
  response_format: {words: 'such as {"type": "json_object"} or a JSON Schema', rows: 3},
};
const NEUTRAL = {temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0};

/** What the server accepts: {field: {minimum, maximum, exclusiveMinimum, integer, choices, default}}. `defaults`: the
 *  model's, if they are known. */
export function readBounds(openapi, defaults, maxTokens) {
  const properties = openapi.components.schemas.ChatCompletionRequest.properties;
  const bounds = {};
  for (const [name, schema] of Object.entries(properties)) {
    const parts = [schema, ...(schema.anyOf || [])];
    const number = parts.find(part => part.type === "number" || part.type === "integer") || {};
    const choices = parts.find(part => part.enum)?.enum;
    bounds[name] = {...number, integer: number.type === "integer", choices};
  }
  for (const [name, value] of Object.entries({...NEUTRAL, ...defaults})) {
    if (bounds[name]) bounds[name].default = defaults ? value : "the model's";
  }
  bounds.max_tokens.maximum = maxTokens ?? undefined;  // unknown before the model is loaded
  return bounds;
}

/** Why a text is no value of the field, or null. */
function problem(name, text, bound) {
  if (text === "") return null;
  const value = Number(text);
  if (!Number.isFinite(value)) return `${name} must be a number.`;
  if (bound.integer && !Number.isInteger(value)) return `${name} must be a whole number.`;
  if (value < bound.minimum) return `${name} must be at least ${bound.minimum}.`;
  if (value <= bound.exclusiveMinimum) return `${name} must be above ${bound.exclusiveMinimum}.`;
  if (value > bound.maximum) return `${name} must be at most ${bound.maximum}.`;
  return null;
}

function jsonProblem(name, text) {
  if (!text.trim()) return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return `${name}: ${error.message}`;
  }
}

/** What is wrong with the settings of a conversation: [{name, text}]. */
export function problemsOf(settings, bounds) {
  return Object.entries(settings).map(([name, text]) => ({name, text: check(name, text, bounds[name])})).filter(one => one.text !== null);
}

function check(name, text, bound) {
  if (name in NUMBERS) return problem(name, text, bound);
  return name in JSON_FIELDS ? jsonProblem(name, text) : null;
}

/** A control with its label; what is wrong in it is marked and kept. */
function field(name, words, control, bound, settings, changed, prefix) {
  const id = `${prefix}setting-${name}`, problemId = `${id}-problem`;
  const error = h("p", {class: "problem", id: problemId, role: "alert"});
  control.id = id;
  control.setAttribute("aria-describedby", problemId);
  const mark = () => {
    const found = check(name, control.value.trim(), bound);
    error.textContent = found ?? "";
    control.setAttribute("aria-invalid", String(found !== null));
  };
  control.addEventListener("input", () => {
    mark();
    if (control.value.trim() === "") delete settings[name];
    else settings[name] = control.value;
    changed();
  });
  mark();
  return h("div", {class: "field"}, h("label", {for: id}, name, h("span", {class: "note"}, ` ${words}`)), control, error);
}

function numberField(name, bound, settings, changed, prefix) {
  const {words} = NUMBERS[name];
  const range = [bound.minimum ?? bound.exclusiveMinimum, bound.maximum].map(value => Math.abs(value) < 1e15 ? value : undefined);
  const control = h("input", {inputmode: "decimal", autocomplete: "off", placeholder: placeholder(bound), value: settings[name] ?? ""});
  const above = bound.minimum === undefined ? "above " : "";
  const limits = range.every(value => value !== undefined) ? `${above}${range[0]} to ${range[1]}; ${words}` : words;
  return field(name, limits, control, bound, settings, changed, prefix);
}

function choiceField(name, words, choices, settings, changed, prefix) {
  const control = h("select", {}, h("option", {value: ""}, "not set"), choices.map(choice => h("option", {value: choice}, choice)));
  control.value = settings[name] ?? "";
  return field(name, words, control, {}, settings, changed, prefix);
}

function textField(name, words, rows, settings, changed, prefix) {
  const control = h("textarea", {rows, spellcheck: "false", value: settings[name] ?? ""});
  return field(name, words, control, {}, settings, changed, prefix);
}

/** A text of JSON, with an editor for those who do not write JSON. */
function jsonField(name, settings, changed, prefix) {
  const {words, rows} = JSON_FIELDS[name], node = textField(name, words, rows, settings, changed, prefix), control = node.querySelector("textarea");
  const write = text => {
    control.value = text;
    control.dispatchEvent(new Event("input"));
  };
  node.append(button("Edit as a form", () => openEditor(name, control.value, write), {"aria-label": `Edit as a form: ${name}`}));
  return node;
}

/** Show the defaults of `bounds` in the fields that are empty. */
export function showDefaults(bounds) {
  for (const name of Object.keys(NUMBERS)) {
    const control = document.getElementById(`setting-${name}`);
    if (control) control.placeholder = placeholder(bounds[name]);
  }
}

const placeholder = bound => String(bound.default ?? "not set");

/** The fields for `target`'s system prompt and settings; `changed()` is called after each change. `side`: of several
 *  forms on a page. */
export function settingsFields(target, bounds, changed, side = "") {
  const {settings} = target, prefix = side && `${side}-`;
  const system = h("textarea", {id: `${prefix}system`, rows: 4, value: target.system, oninput: () => {
    target.system = system.value;
    changed();
  }});
  const efforts = bounds.reasoning_effort?.choices;
  return [
    h("div", {class: "field"}, h("label", {for: `${prefix}system`}, "System prompt"), system),
    Object.keys(NUMBERS).map(name => numberField(name, bounds[name], settings, changed, prefix)),
    textField("stop", "ends the answer; one text per line", 2, settings, changed, prefix),
    efforts && choiceField("reasoning_effort", "for models that think", efforts, settings, changed, prefix),
    Object.keys(JSON_FIELDS).map(name => jsonField(name, settings, changed, prefix)),
  ].flat().filter(Boolean);
}

/** Servers of the Model Context Protocol, if the server of this page allows any. */
function mcpField(chat) {
  const {mcp} = chat, {origins} = mcp;
  if (!origins.length) return null;
  const urls = h("textarea", {id: "mcp", rows: 2, value: mcp.urls.join("\n"), placeholder: `${origins[0]}/mcp`, spellcheck: "false"});
  const begin = mcp.count ? `${mcp.count} tools.` : mcp.urls.length ? "Not connected." : "";
  const told = h("p", {class: "note", role: "status"}, begin);
  const connect = async () => {
    told.textContent = "Connecting …";
    try {
      told.textContent = `${await chat.useMcp(urls.value.split("\n").map(line => line.trim()).filter(Boolean))} tools.`;
    } catch (error) {
      told.textContent = error.message;
    }
  };
  return h("div", {class: "field"}, h("label", {for: "mcp"}, "MCP servers", h("span", {class: "note"}, ` a URL per line, at ${origins.join(", ")}`)), urls,
    h("div", {class: "row"}, button("Connect", connect, {id: "mcp-connect"})), told);
}

/** The form for the open conversation. */
export function settingsForm(chat) {
  const again = () => { chat.showSettings(); chat.save(); };
  return [h("h2", {}, "Settings"), presetRow(chat.open, again), ...settingsFields(chat.open, chat.server.bounds(chat.model), () => chat.save()), mcpField(chat)].filter(Boolean);
}

/** The fields of a request for `settings`. */
export function requestFields(settings) {
  const fields = {};
  for (const [name, text] of Object.entries(settings)) {
    if (name === "model") continue;
    if (name === LOGPROBS) fields.logprobs = true;
    if (name in NUMBERS) fields[name] = Number(text);
    else if (name in JSON_FIELDS) fields[name] = JSON.parse(text);
    else if (name === "stop") fields.stop = text.split("\n").filter(line => line !== "");
    else fields[name] = text;
  }
  return fields;
}
