// The cluster as it is drawn: stages from left to right, devices as large as what they run.

import { bytes, element, seconds } from "./api.js";

/** Where the time of a step goes: the class of its colour, its words, the counters in it. */
export const PARTS = [
  ["compute", "computing", ["compute_s"]],
  ["load", "waiting for the disk", ["load_s"]],
  ["sum", "sums with its stage", ["reduce_s"]],
  ["wait", "waiting for the stage before", ["receive_s"]],
  ["send", "handing on", ["send_s"]],
  ["sample", "choosing tokens", ["sample_s"]],
];

/** The devices of a plan and their links. times: of each device by number, or nothing. */
export function draw(into, view, times = []) {
  const stages = [];
  view.devices.forEach((device, number) => {
    (stages[device.stage] ??= []).push({ ...device, times: times[number] });
  });
  const drawn = [];
  stages.forEach((devices, number) => {
    if (number) drawn.push(hop(link(view, stages[number - 1], devices)));
    drawn.push(stage(devices, view));
  });
  into.replaceChildren(...drawn);
}

/** What is said of a plan, a sentence on each line. */
export function tellNotes(into, view) {
  into.replaceChildren(...view.notes.map((note) => element("li", "", `${note}.`)));
}

function stage(devices, view) {
  const [first, past] = devices[0].layers;
  const drawn = element("div", "stage", element("div", "title", `layers ${first}–${past - 1}`));
  drawn.style.flexGrow = devices.reduce((sum, each) => sum + each.weight_bytes, 1);
  devices.forEach((each, number) => {
    if (number) drawn.append(summed(link(view, [devices[number - 1]], [each])));
    const card = device(each, devices.length > 1);
    card.style.flexGrow = Math.max(1, each.weight_bytes);
    drawn.append(card);
  });
  return drawn;
}

/** sharesStage: or else it has all of its layers. */
function device(each, sharesStage) {
  const name = element("div", "name", each.name);
  const health = each.health ?? "alive";
  const [state] = health.split(" "); // of "slow by 2.1" and "silent for 4 s"
  const isWell = state === "alive" || state === "busy";
  const goesOn = state === "leaving" || state === "slow" || state === "silent";
  if (!isWell) name.append(element("span", `badge ${goesOn ? "warn" : "bad"}`, health));
  const drawn = element(
    "div", `device ${isWell ? "" : goesOn ? "slow" : "lost"}`,
    name, sharesStage ? element("div", "has", each.has) : null,
  );
  drawn.append(...layers(each));
  const free = Math.max(0, each.left_bytes);
  const all = each.weight_bytes + each.kv_bytes + free || 1;
  drawn.append(
    bar([["weights", each.weight_bytes / all], ["kv", each.kv_bytes / all]]),
    element(
      "div", "more",
      `${bytes(each.weight_bytes)} weights, ${bytes(each.kv_bytes)} keys and values, ${bytes(free)} left`,
    ),
    ...elsewhere(each.tiers),
  );
  if (each.times && each.times.steps) {
    const { steps } = each.times;
    const parts = PARTS.map(([kind, , counters]) =>
      [kind, counters.reduce((sum, name) => sum + each.times[name], 0) / steps]);
    const whole = parts.reduce((sum, [, part]) => sum + part, 0) || 1;
    const shown = parts.filter(([, part]) => part >= whole / 100);
    drawn.append(
      bar(parts.map(([kind, part]) => [kind, part / whole])),
      element("div", "more", `a step: ${shown
        .map(([kind, part]) => `${kind} ${seconds(part)}`).join(", ")}`),
    );
  }
  return drawn;
}

/** A cell for each of its layers, by where it waits for its use, if not all are in memory. */
function layers(each) {
  const [first, past] = each.layers;
  const streamed = each.streamed_layers;
  if (!streamed) return [];
  const counts = [
    ["memory", past - first - streamed, "in memory"],
    ["host", each.host_layers, "in its host's memory"],
    ["disk", streamed - each.host_layers, "read from disk"],
  ].filter(([, count]) => count);
  const cells = element("div", "tiers");
  cells.setAttribute("aria-hidden", "true");
  for (const [tier, count] of counts) {
    for (let number = 0; number < count; number += 1) cells.append(element("span", `t-${tier}`));
  }
  const told = counts.map(([, count, where]) => `${count} ${where}`).join(", ");
  return [cells, element("div", "more", `layers: ${told}`)];
}

/** What lies elsewhere than in its memory, and what is kept of earlier prompts. */
function elsewhere(tiers) {
  if (!tiers) return [];
  const told = (counted, ...places) => {
    const there = places.filter(([size]) => size).map(([size, where]) => `${bytes(size)} ${where}`);
    return there.length ? element("div", "more", `${counted}: ${there.join(", ")}`) : null;
  };
  return [
    told("each step reads", [tiers.streamed_bytes, "from disk"]),
    told("keys and values elsewhere", [tiers.kv_host_bytes, "in its host's memory"], [tiers.kv_disk_bytes, "on disk"]),
    told("kept of earlier prompts", [tiers.kept_bytes, "in memory"], [tiers.kept_disk_bytes, "on disk"]),
  ].filter(Boolean);
}

function bar(parts) {
  const drawn = element("div", "bar");
  drawn.setAttribute("aria-hidden", "true");
  for (const [kind, share] of parts) {
    const part = element("span", `c-${kind}`);
    part.style.width = `${100 * share}%`;
    drawn.append(part);
  }
  return drawn;
}

/** The slowest link from one of these devices to one of those, either way; or nothing. */
function link(view, these, those) {
  const ends = (each) => these.some((one) => one.name === each.source)
    && those.some((one) => one.name === each.target);
  const found = view.links.filter((each) => ends(each) || ends({ source: each.target, target: each.source }));
  return found.sort((a, b) => a.bytes_per_s - b.bytes_per_s)[0];
}

function said(found) {
  return found ? `${seconds(found.latency_s)}, ${bits(found.bytes_per_s)}` : "";
}

function bits(bytesPerSecond) {
  const rate = bytesPerSecond * 8;
  return rate >= 1e9 ? `${(rate / 1e9).toFixed(1)} Gbit/s` : `${(rate / 1e6).toFixed(0)} Mbit/s`;
}

/** Ten times the rate is two pixels more. */
function thick(line, found) {
  if (found) line.style.setProperty("--thick", `${Math.max(1, 2 * Math.log10(found.bytes_per_s / 1e5))}px`);
  return line;
}

function hop(found) {
  return element("div", "hop", thick(element("i"), found), said(found).replace(", ", ",\n") || "→");
}

function summed(found) {
  return element("div", "sum", thick(element("i"), found), `sums${found ? `: ${said(found)}` : ""}`);
}
