"use strict";
// Everything comes from openapi.json beside this page: its URL is relative, so that a path prefix of a proxy does not matter.

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node[key] = value;
  node.append(...children);  // text stays text: nothing is parsed as HTML
  return node;
}

function key() { return document.getElementById("key").value.trim(); }

function headers() { return key() ? {Authorization: "Bearer " + key()} : {}; }

function say(text) { document.getElementById("message").textContent = text; }

function shortName(reference) { return reference.split("/").pop(); }

// The type of a schema, in words; names of other types become links.
function typeOf(schema) {
  if (schema === undefined) return ["any"];
  if (schema.$ref) return [element("a", {href: "#type-" + shortName(schema.$ref)}, shortName(schema.$ref))];
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.flatMap((choice, i) => i ? [" or ", ...typeOf(choice)] : typeOf(choice));
  if (schema.enum) return [schema.enum.map(value => JSON.stringify(value)).join(" or ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items)];
  if (schema.type === "object" && schema.additionalProperties) return ["object of ", ...typeOf(schema.additionalProperties)];
  return [schema.type || "any"];
}

const BOUNDS = {minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below", minLength: "characters, at least",
  maxLength: "characters, at most", minItems: "items, at least", maxItems: "items, at most", maxProperties: "entries, at most", pattern: "matches"};

function boundsOf(schema) {
  const parts = [schema, ...(schema.anyOf || [])].flatMap(part =>
    Object.entries(BOUNDS).filter(([name]) => name in part).map(([name, words]) => words + " " + part[name]));
  return [...new Set(parts)].join("; ");
}

function fieldsOf(schema) {
  const required = new Set(schema.required || []);
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => element("tr", {},
    element("td", {}, element("code", {}, name), required.has(name) ? " (required)" : ""),
    element("td", {}, ...typeOf(field)),
    element("td", {}, "default" in field ? JSON.stringify(field.default) : ""),
    element("td", {}, [boundsOf(field), field.description || ""].filter(Boolean).join(". "))));
  if (!rows.length) return element("p", {className: "note"}, ...typeOf(schema));
  const head = element("tr", {}, ...["field", "type", "default", "limits"].map(title => element("th", {}, title)));
  return element("table", {}, head, ...rows);
}

function jsonSchema(part) {
  const content = part && part.content && part.content["application/json"];
  return content && content.schema;
}

function tryForm(path, method, hasBody, example) {
  const address = element("input", {value: path.slice(1), size: 50});
  const body = element("textarea", {rows: 6, value: JSON.stringify(example || {}, null, 2)});
  const answer = element("pre", {hidden: true});
  const button = element("button", {type: "button"}, "Send");
  button.onclick = async () => {
    answer.hidden = false;
    answer.textContent = "...";
    try {
      const options = {method: method.toUpperCase(), headers: headers()};
      if (hasBody) Object.assign(options, {body: body.value, headers: {...headers(), "Content-Type": "application/json"}});
      const response = await fetch(address.value, options);
      answer.textContent = response.status + " " + response.statusText + "\n\n";
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) answer.textContent += part.value;
    } catch (error) {
      answer.textContent = String(error);
    }
  };
  return element("div", {}, element("p", {}, address, " ", button), ...(hasBody ? [body] : []), answer);
}

// The example of a part's first content that has one.
function exampleOf(part) {
  return Object.values((part && part.content) || {}).map(content => content.example).find(example => example !== undefined);
}

function parametersOf(parameters) {
  return element("ul", {}, ...parameters.map(one => element("li", {}, element("code", {}, one.name), ` (${one.in}, `,
    ...typeOf(one.schema), ") ", one.description || "")));
}

function exampleNode(responses) {
  const [status, response] = Object.entries(responses).find(([, response]) => exampleOf(response) !== undefined) || [];
  if (!status) return [];
  const example = exampleOf(response), text = typeof example === "string" ? example : JSON.stringify(example, null, 2);
  return [element("details", {className: "example"}, element("summary", {}, `Example of an answer (${status})`), element("pre", {}, text))];
}

function route(path, method, operation) {
  const body = jsonSchema(operation.requestBody);
  const answer = jsonSchema((operation.responses || {})["200"]);
  const node = element("details", {}, element("summary", {}, element("span", {className: "method"}, method.toUpperCase()),
    element("span", {className: "path"}, path), " ", element("span", {className: "note"}, operation.description || "")));
  if (operation.parameters) node.append(parametersOf(operation.parameters));
  if (body) node.append(element("p", {}, "Body: ", ...typeOf(body)));
  if (answer) node.append(element("p", {}, "Answer: ", ...typeOf(answer)));
  node.append(...exampleNode(operation.responses || {}), tryForm(path, method, Boolean(body), exampleOf(operation.requestBody)));
  return node;
}

function show(spec) {
  const routes = Object.entries(spec.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(path, method, operation)));
  const types = Object.entries((spec.components || {}).schemas || {}).map(([name, schema]) => element("details", {id: "type-" + name},
    element("summary", {}, element("code", {}, name)), element("p", {}, schema.description || ""), fieldsOf(schema)));
  document.getElementById("routes").replaceChildren(...routes);
  document.getElementById("types").replaceChildren(element("h2", {}, "Types"), ...types);
  say(spec.info.title + " " + spec.info.version);
}

async function load() {
  try {
    const response = await fetch("openapi.json", {headers: headers()});
    if (response.status === 401) return say(key() ? "The server does not accept this key." : "The server wants an API key: enter it above.");
    if (!response.ok) return say("openapi.json: HTTP " + response.status + ". Is the model still loading? Load again in a moment.");
    show(await response.json());
  } catch (error) {
    say("openapi.json cannot be loaded: " + error);
  }
}

// A link to a type opens it.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target) target.open = true;
}

document.getElementById("access").onsubmit = event => { event.preventDefault(); load(); };
window.onhashchange = openTarget;
load();
