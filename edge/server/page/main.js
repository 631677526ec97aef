// The page: asks every second, while it is looked at, how things are.

import { askJson, bytes, element, needsKey, predictedRate, rate, seconds, setKey } from "./api.js";
import { setCanChat } from "./chat.js";
import { draw, PARTS, tellNotes } from "./cluster.js";
import { choice, chosenModel, offerModels } from "./models.js";
import { offer, offerDevices } from "./preview.js";

const EVERY_MS = 1000;
const KEPT = 120;

const at = (id) => document.getElementById(id);
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = localStorage.getItem("edge-theme");
let last = null;
let times = [];
let hasOffer = false;
let hasModels = false;
const rates = [];

function theme() {
  root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
}
theme();
dark.addEventListener("change", theme);
at("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("edge-theme", chosen);
  theme();
});

at("legend").replaceChildren(...PARTS.map(([kind, words]) =>
  element("li", "", element("i", `c-${kind}`), words)));

needsKey.addEventListener("asked", () => {
  at("key-form").hidden = false;
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim());
  at("key").value = "";
  at("key-form").hidden = true;
  look();
});

function state(kind, words) {
  at("state").dataset.state = kind;
  if (at("state").textContent !== words) at("state").textContent = words;
}

function since(before, now) {
  const counted = {};
  for (const name of Object.keys(now)) counted[name] = now[name] - (before?.[name] ?? 0);
  return counted;
}

function show(view) {
  const { model } = view;
  at("model").textContent = `${model.name} (${model.dtype}), context ${model.context_tokens} tokens`;
  document.title = `${model.name} · Edge`;
  setCanChat(model.can_chat, model.reads_pictures);
  if (model.is_over) state("bad", "has ended");
  else if (model.is_recovering) state("busy", "a device was lost; going on without it");
  else state("ok", view.replies.length ? "answering" : "ready");

  const isSame = last !== null && last.loads === view.loads && last.at_s <= view.at_s;
  if (isSame && view.at_s > last.at_s) {
    rates.push((view.new_tokens - last.new_tokens) / (view.at_s - last.at_s));
    while (rates.length > KEPT) rates.shift();
  }
  if (!isSame) times = [];
  view.devices.forEach((device, number) => {
    const counted = device.decode && isSame && last.devices[number].decode
      ? since(last.devices[number].decode, device.decode) : null;
    if (counted?.steps) times[number] = counted;
  });
  at("rate").textContent = rates.length ? rate(rates[rates.length - 1]) : "–";
  at("measured").textContent = rate(view.measured.tokens_per_s);
  at("predicted").textContent = view.predicted ? predictedRate(view.predicted) : "–";
  at("answers").textContent = view.answers;
  at("guesses").textContent = guesses(view.guesses);
  const most = Math.max(1, ...rates);
  at("spark").firstElementChild.setAttribute("points", rates
    .map((each, number) => `${KEPT - rates.length + number},${31 - (30 * each) / most}`).join(" "));
  draw(at("cluster"), view, times);
  tellNotes(at("notes"), view);
  at("spares").textContent = view.spares.length
    ? `Not needed now: ${view.spares.map((each) => `${each.name} (${spare(each)})`).join(", ")}`
    : "";
  at("replies").replaceChildren(replies(view.replies));
  const told = happened(view);
  at("events").replaceChildren(...(told.length ? told : ["None."]).map((each) => element("li", "", each)));
  const spares = view.spares.filter((each) => each.free_bytes !== null);
  offerDevices([...new Set([...view.devices, ...spares].map((each) => each.name))]);
  last = view;
}

function guesses({ drafted_tokens: drafted, accepted_tokens: right, steps }) {
  return steps
    ? `${right} of ${drafted} guessed tokens were right: ${(1 + right / steps).toFixed(1)} tokens for each pass with guesses.`
    : "";
}

function spare({ health, free_bytes: free }) {
  return free === null ? health : `${health}, ${bytes(free)} free`;
}

/** Losses and returns, in the order in which they came. */
function happened({ recoveries, returns }) {
  const told = [];
  for (let number = 0; number <= recoveries.length; number += 1) {
    for (const each of returns.filter((one) => one.recoveries === number)) {
      told.push(`${each.name} answers again, after ${seconds(each.away_s)}`);
    }
    if (number < recoveries.length) told.push(`${recoveries[number].reason}; ${goneOn(recoveries[number])}`);
  }
  return told;
}

function goneOn({ answers, pause_s: pause }) {
  if (!answers) return `ready again after ${seconds(pause)}`;
  return `${answers} ${answers === 1 ? "answer" : "answers"} went on after ${seconds(pause)}`;
}

function replies(under) {
  if (!under.length) return element("p", "hint", "None under way.");
  const table = element("table", "", element("thead", "", element(
    "tr", "", ...["since", "prompt", "tokens so far"].map((each) => element("th", "", each)),
  )));
  table.append(element("tbody", "", ...under.map((each) => element(
    "tr", "", element("td", "", seconds(each.age_s)), element("td", "", `${each.prompt_tokens}`),
    element("td", "", `${each.new_tokens}`),
  ))));
  return table;
}

let isLooking = false;
async function look() {
  if (isLooking || document.visibilityState !== "visible") return;
  isLooking = true;
  try {
    if (!hasModels) {
      await offerModels();
      hasModels = true;
    }
    const model = chosenModel();
    const view = await askJson(`api/cluster?${new URLSearchParams({ model })}`);
    if (model !== chosenModel()) return; // another one meanwhile
    show(view);
    if (!hasOffer) {
      await offer();
      hasOffer = true;
    }
  } catch (error) {
    state("bad", error.message);
  } finally {
    isLooking = false;
  }
}
choice.addEventListener("chosen", () => {
  last = null;
  times = [];
  rates.length = 0;
  look();
});
setInterval(look, EVERY_MS);
document.addEventListener("visibilitychange", look);
look();
