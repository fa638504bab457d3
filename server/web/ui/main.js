// The page: which view is shown, the colours, and what the views need to know of the server.

import { ApiError, Unreachable, askAgain } from "./api.js";
import { Chat } from "./chat.js";
import { button, byId, h, keep, recall } from "./dom.js";
import { describeServer } from "./served.js";
import { offerSpeech } from "./speech.js";
import { Watch } from "./watch.js";

const THEMES = ["system", "light", "dark"];
const VIEWS = ["chat", "compare", "watch"];
const PAUSE = 2000;  // milliseconds between tries to reach the server
let watch = null, chat = null, compare = null;

async function showView() {
  const view = VIEWS.find(name => location.hash === `#${name}`) ?? "chat";
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    byId(`to-${name}`).ariaCurrent = name === view ? "page" : null;
  }
  document.body.classList.toggle("watching", view !== "chat");
  if (view === "watch") (watch ??= new Watch()).show();
  if (view === "compare" && chat) compare ??= new (await import("./compare.js")).Compare(chat);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const label = `Colours: ${theme === "system" ? "as the system" : theme}`;
  Object.assign(byId("theme"), {ariaLabel: label, title: label});
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(theme);
  keep("quire theme", theme);
}

/** The buttons that open the panels beside the conversation. On a narrow page they lie over it, and close when it is
 *  touched, when a conversation is chosen, and with Escape. */
function panels() {
  const found = {"open-list": "list", "open-settings": "settings"};
  const set = (toggle, shown) => {
    byId(found[toggle]).classList.toggle("shown", shown);
    byId(toggle).ariaExpanded = String(shown);
  };
  const close = () => Object.keys(found).forEach(toggle => set(toggle, false));
  for (const [toggle, panel] of Object.entries(found)) {
    byId(toggle).addEventListener("click", () => {
      const shown = !byId(panel).classList.contains("shown");
      close();
      set(toggle, shown);
    });
  }
  byId("conversation").addEventListener("pointerdown", close);
  byId("list").addEventListener("click", event => { if (event.target.closest(".title, #new")) close(); });
  document.addEventListener("keydown", event => {
    const toggle = Object.keys(found).find(one => byId(found[one]).classList.contains("shown"));
    if (event.key !== "Escape" || !toggle || byId("dialog").open) return;
    event.stopImmediatePropagation();  // it does not stop the answer, too
    close();
    byId(toggle).focus();
  });
}

/** The chooser of what /v1/models lists; `chosen(name)` is told of another one. */
function modelChooser(server, chosen) {
  const node = byId("model");
  node.addEventListener("change", () => chosen(node.value));
  server.choose = name => {
    const cards = Object.values(server.cards);
    node.replaceChildren(...server.options());
    node.classList.toggle("single", cards.length === 1);
    node.value = name;
  };
  node.hidden = false;
}

/** What the server has, once it answers. */
async function reach() {
  for (;;) {
    try {
      return await describeServer();
    } catch (error) {
      if (!(error instanceof Unreachable) && error.status !== 503) throw error;
      byId("notice").textContent = `${error.message} Trying again …`;
    }
    await new Promise(resolve => { setTimeout(resolve, PAUSE); });
  }
}

/** Say why the page cannot start; without a key it can ask for one again. */
function cannotStart(error) {
  const again = () => { askAgain(); start(); };
  byId("notice").replaceChildren(error.message, error instanceof ApiError && error.status === 401 ? button("Enter a key", again) : "");
}

async function start() {
  try {
    const server = await reach();
    chat = new Chat(server);
    modelChooser(server, name => chat.chooseModel(name));
    await chat.start();
    if (server.hears(chat.model)) offerSpeech(() => server.hears(chat.model), text => chat.composer.insert(text), text => chat.say(text));
    byId("input").focus();
  } catch (error) {
    cannotStart(error);
  }
  showView();
}

setTheme(recall("quire theme") ?? "system");
byId("theme").addEventListener("click", nextTheme);
panels();
window.addEventListener("hashchange", showView);
start();
