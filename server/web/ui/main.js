// The page: which view is shown, the colours, and what the views need to know of the server.

import { ApiError, getJson, getPrivileged, hasKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { readBounds } from "./settings.js";
import { Watch } from "./watch.js";

const THEMES = ["system", "light", "dark"];
let watch = null;

function showView() {
  const watching = location.hash === "#watch";
  byId("chat").hidden = watching;
  byId("watch").hidden = !watching;
  document.body.classList.toggle("watching", watching);
  byId("to-chat").ariaCurrent = watching ? null : "page";
  byId("to-watch").ariaCurrent = watching ? "page" : null;
  if (watching) (watch ??= new Watch()).show();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const label = `Colours: ${theme === "system" ? "as the system" : theme}`;
  Object.assign(byId("theme"), {ariaLabel: label, title: label});
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(theme);
  localStorage.setItem("quire theme", theme);
}

/** The buttons that open the panels beside the conversation. */
function panel(buttonId, panelId) {
  const toggle = byId(buttonId);
  toggle.addEventListener("click", () => {
    const open = byId(panelId).classList.toggle("shown");
    toggle.ariaExpanded = String(open);
  });
}

async function describeServer() {
  const [{data}, openapi] = await Promise.all([getJson("v1/models"), getJson("openapi.json")]);
  const info = hasKey() ? null : await getPrivileged("server_info");  // most keys may not read it
  const models = data.map(card => card.id);
  byId("model").textContent = models[0];
  const bounds = readBounds(openapi, info?.sampling_defaults ?? {}, data[0].max_model_len);
  return {model: models[0], models, images: info?.images ?? {accepted: true}, bounds};
}

async function start() {
  setTheme(localStorage.getItem("quire theme") ?? "system");
  byId("theme").addEventListener("click", nextTheme);
  panel("open-list", "list");
  panel("open-settings", "settings");
  window.addEventListener("hashchange", showView);
  try {
    const chat = new Chat(await describeServer());
    await chat.start();
    byId("input").focus();
  } catch (error) {
    const hint = error instanceof ApiError && error.status === 401 ? " Reload the page to enter a key." : "";
    byId("notice").textContent = `${error.message}${hint}`;
  }
  showView();
}

start();
