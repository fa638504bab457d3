// Forms for what is JSON in a request: the tools, and the form of the answer. What a form cannot show stays as it is.

import { button, byId, h, showDialog } from "./dom.js";

const TYPES = ["string", "number", "integer", "boolean", "array", "object"];
const read = (text, otherwise) => {
  try {
    return JSON.parse(text) ?? otherwise;
  } catch {  // nothing yet, or no JSON: the form begins anew
    return otherwise;
  }
};

/** Open the editor of a field; `write(text)` gets the new JSON. */
export function openEditor(name, text, write) {
  const made = name === "tools" ? toolsForm(read(text, [])) : formatForm(read(text, null));
  const form = h("form", {class: "editor", onsubmit: event => {
    event.preventDefault();
    const value = made.value();
    write(value === null ? "" : JSON.stringify(value, null, 1));
    byId("dialog").close();
  }}, made.node, h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), h("button", {type: "submit", class: "main"}, "Use")));
  showDialog(name === "tools" ? "Tools" : "Form of the answer", form);
}

function labelled(label, control) {
  return h("label", {}, h("span", {}, label), control);
}

/** A list whose entries can be added and removed. `entry(value)`: {node, value()}. */
function listOf(values, entry, label, empty) {
  const entries = [], node = h("div", {});
  const add = value => {
    const made = entry(value), row = h("div", {class: "entry"}, made.node,
      button("×", () => { entries.splice(entries.indexOf(made), 1); row.remove(); more.focus(); }, {"aria-label": `Remove ${label}`}));
    entries.push(made);
    node.append(row);
    return row;
  };
  values.forEach(add);
  const more = button(`Add ${label}`, () => add(empty()).querySelector("input").focus());
  return {node: h("div", {}, node, more), value: () => entries.map(one => one.value())};
}

/** The fields of an object. Types that the form has no words for keep their schema. */
function schemaForm(schema) {
  const {properties = {}, required = [], ...rest} = schema;
  const list = listOf(Object.entries(properties).map(([name, value]) => ({name, value, required: required.includes(name)})), ({name, value, required: must}) => {
    const simple = TYPES.includes(value.type);
    const title = h("input", {value: name, required: true}), about = h("input", {value: value.description ?? ""});
    const type = h("select", {}, [...TYPES, ...(simple ? [] : ["as in JSON"])].map(one => h("option", {value: one}, one)));
    type.value = simple ? value.type : "as in JSON";
    const need = h("input", {type: "checkbox", checked: must});
    return {
      node: h("div", {class: "fields"}, labelled("Field", title), labelled("Type", type), labelled("Description", about), labelled("Required", need)),
      value: () => {
        const {description, ...others} = type.value === value.type || type.value === "as in JSON" ? value : {type: type.value};
        return [title.value.trim(), {...others, ...(about.value && {description: about.value})}, need.checked];
      },
    };
  }, "field", () => ({name: "", value: {type: "string"}, required: true}));
  return {node: list.node, value: () => {
    const found = list.value();
    return {...rest, type: "object", properties: Object.fromEntries(found.map(([name, value]) => [name, value])), required: found.filter(one => one[2]).map(([name]) => name)};
  }};
}

function toolsForm(tools) {
  const list = listOf(Array.isArray(tools) ? tools : [], tool => {
    if (tool?.type !== "function") return {node: h("p", {class: "note"}, `As in JSON: ${JSON.stringify(tool).slice(0, 80)}`), value: () => tool};
    const {name = "", description = "", parameters = {}} = tool.function ?? {};
    const title = h("input", {value: name, required: true, pattern: "[A-Za-z0-9_.\\-]{1,64}"}), about = h("textarea", {rows: 2, value: description});
    const schema = schemaForm(parameters);
    return {
      node: h("fieldset", {}, h("legend", {}, "Tool"), labelled("Name", title), labelled("Description", about), schema.node),
      value: () => ({...tool, function: {...tool.function, name: title.value.trim(), ...(about.value && {description: about.value}), parameters: schema.value()}}),
    };
  }, "tool", () => ({type: "function", function: {}}));
  return {node: list.node, value: () => { const found = list.value(); return found.length ? found : null; }};
}

function formatForm(format) {
  const kind = h("select", {}, [["", "Any text"], ["json_object", "Any JSON object"], ["json_schema", "JSON by a schema"]].map(([value, label]) => h("option", {value}, label)));
  kind.value = format?.type ?? "";
  const given = format?.json_schema ?? {}, name = h("input", {value: given.name ?? "answer", required: true});
  const schema = schemaForm(given.schema ?? {}), part = h("div", {}, labelled("Name", name), schema.node);
  const show = () => { part.hidden = kind.value !== "json_schema"; name.disabled = part.hidden; };
  kind.addEventListener("change", show);
  show();
  return {node: h("div", {}, labelled("The answer is", kind), part), value: () => {
    if (!kind.value) return null;
    if (kind.value === "json_object") return {type: "json_object"};
    return {type: "json_schema", json_schema: {...given, name: name.value.trim(), schema: schema.value()}};
  }};
}
