// Presets: a system prompt and settings under a name.

import { button, byId, h, showDialog } from "./dom.js";
import * as store from "./store.js";

/** The row above the settings: choose a preset, keep the settings as one, delete one. `target` takes what it holds. */
export function presetRow(target, changed) {
  let presets = [];
  const choice = h("select", {"aria-label": "Preset"}), chosen = () => presets.find(({name}) => name === choice.value);
  const remove = button("Delete", () => confirmRemoval(chosen(), fill), {"aria-label": "Delete the preset"});
  const fill = async () => {
    presets = await store.presets().catch(() => []);  // a browser that keeps nothing
    choice.replaceChildren(h("option", {value: ""}, presets.length ? "Preset …" : "No presets yet"), ...presets.map(({name}) => h("option", {value: name}, name)));
    remove.disabled = true;
  };
  choice.addEventListener("change", () => {
    const preset = chosen();
    remove.disabled = !preset;
    if (!preset) return;
    target.system = preset.system;
    for (const name of Object.keys(target.settings)) delete target.settings[name];
    Object.assign(target.settings, preset.settings);
    changed();
  });
  fill();
  return h("div", {class: "field presets"}, choice, h("div", {class: "row"}, button("Keep as preset", () => keep(target, fill)), remove));
}

function confirmRemoval({name}, done) {
  const remove = async () => {
    await store.removePreset(name);
    byId("dialog").close();
    done();
  };
  showDialog("Delete", h("p", {}, `Delete the preset "${name}"?`),
    h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), button("Delete", remove, {id: "confirm", class: "main"})));
}

function keep(target, done) {
  const name = h("input", {id: "preset-name", required: true, maxlength: 80, pattern: ".*\\S.*"}), problem = h("p", {class: "problem", role: "alert"});
  const form = h("form", {onsubmit: async event => {
    event.preventDefault();
    try {
      await store.putPreset({name: name.value.trim(), system: target.system, settings: {...target.settings}});
      byId("dialog").close();
    } catch (error) {
      problem.textContent = store.storeProblem(error);
    }
    done();
  }}, h("label", {for: "preset-name"}, "Name"), name, problem,
  h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), h("button", {type: "submit", class: "main"}, "Keep")));
  showDialog("Preset", form);
  name.focus();
}
