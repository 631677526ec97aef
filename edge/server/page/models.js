// Which of the server's models is looked at and talked to.

import { askJson } from "./api.js";

const select = document.getElementById("models");

/** Told when another one is chosen. */
export const choice = new EventTarget();

/** Its name; "default": the server's first. */
export function chosenModel() {
  return select.value || "default";
}

/** The models that there are to choose from; one alone is no choice. */
export async function offerModels() {
  const { data } = await askJson("v1/models");
  select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
  select.hidden = data.length < 2;
}

select.addEventListener("change", () => choice.dispatchEvent(new Event("chosen")));
