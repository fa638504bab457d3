// Presets: a system prompt and settings under a name.

import { button, byId, h, showDialog } from "./dom.js";
import * as store from "./store.js";

/** The row above the settings: choose a preset, keep the settings as one, delete one. `target` takes what it holds. */
export function presetRow(target, changed) {
  const node = h("div", {class: "field presets"});
  fill(node, target, changed);
  return node;
}

async function fill(node, target, changed) {
  const presets = await store.presets(), again = () => fill(node, target, changed);
  const choice = h("select", {"aria-label": "Preset"}, h("option", {value: ""}, presets.length ? "Preset …" : "No presets yet"),
    presets.map(({name}) => h("option", {value: name}, name)));
  const chosen = () => presets.find(({name}) => name === choice.value);
  const remove = button("Delete", async () => { await store.removePreset(chosen().name); again(); }, {disabled: true, "aria-label": "Delete the preset"});
  choice.addEventListener("change", () => {
    const preset = chosen();
    remove.disabled = !preset;
    if (!preset) return;
    target.system = preset.system;
    for (const name of Object.keys(target.settings)) delete target.settings[name];
    Object.assign(target.settings, preset.settings);
    changed();
  });
  node.replaceChildren(choice, h("div", {class: "row"}, button("Keep as preset", () => keep(target, again)), remove));
}

function keep(target, done) {
  const name = h("input", {id: "preset-name", required: true, maxlength: 80});
  const form = h("form", {onsubmit: async event => {
    event.preventDefault();
    await store.putPreset({name: name.value.trim(), system: target.system, settings: {...target.settings}});
    byId("dialog").close();
    done();
  }}, h("label", {for: "preset-name"}, "Name"), name,
  h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), h("button", {type: "submit", class: "main"}, "Keep")));
  showDialog("Preset", form);
  name.focus();
}
