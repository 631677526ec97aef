// Where a model would run, and how fast, if something were otherwise.

import { askJson, element, predictedRate } from "./api.js";
import { draw, tellNotes } from "./cluster.js";

const said = document.getElementById("preview-said");
const into = document.getElementById("preview");
const notes = document.getElementById("preview-notes");
const devices = document.getElementById("preview-devices");

/** The models and devices that there are to choose from. */
export async function offer() {
  const { models } = await askJson("api/plan/models");
  document.getElementById("preview-model").replaceChildren(
    ...models.map((name) => new Option(name, name)),
  );
  document.querySelector("#preview-form button").disabled = false;
}

/** A box to tick for each device, which keeps what was chosen. */
export function offerDevices(names) {
  const known = [...devices.querySelectorAll("input")].map((each) => each.value);
  if (known.join("\n") === names.join("\n")) return;
  const out = new Set([...devices.querySelectorAll("input:not(:checked)")].map((each) => each.value));
  devices.replaceChildren(...names.map((name) => {
    const box = element("input");
    box.type = "checkbox";
    box.value = name;
    box.checked = !out.has(name);
    return element("label", "", box, name);
  }));
}

document.getElementById("preview-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const query = new URLSearchParams({ model: document.getElementById("preview-model").value });
  for (const box of devices.querySelectorAll("input:not(:checked)")) query.append("change", `without ${box.value}`);
  const change = document.getElementById("preview-change").value.trim();
  if (change) query.append("change", change);
  said.textContent = "Planning …";
  try {
    const view = await askJson(`api/plan?${query}`);
    draw(into, view);
    tellNotes(notes, view);
    said.textContent = view.predicted
      ? `${predictedRate(view.predicted)} tokens per second predicted.`
      : "How fast is not known: not every device was measured for this model. edge plan measures.";
  } catch (error) {
    into.replaceChildren();
    notes.replaceChildren();
    said.textContent = error.message;
  }
});
