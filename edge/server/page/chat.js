// A conversation: streamed, stopped, asked again, edited. It is kept in this page alone.

import { ask, element, events, rate, seconds } from "./api.js";
import { chosenModel } from "./models.js";

const log = document.getElementById("log");
const input = document.getElementById("ask");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

const pictureInput = document.getElementById("picture");

/** Each {role, text, pictures}; those of the assistant with a thought, figures, an error. */
let messages = [];
/** Data URLs of the pictures of the next message. */
let pictures = [];
let readsPictures = false;
let underWay = null;
let canChat = true;

export function setCanChat(can, reads) {
  readsPictures = can && reads;
  document.getElementById("add-picture").hidden = !readsPictures;
  if (canChat === can) return;
  canChat = can;
  document.getElementById("chat-title").textContent = can ? "Chat" : "Go on from a text";
}

function show() {
  log.replaceChildren(...messages.map(drawn));
  log.scrollTop = log.scrollHeight;
}

function drawn(message, number) {
  const box = element("article", `message ${message.role}`);
  box.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
  if (message.thought) box.append(element("div", "thought", message.thought));
  if (message === underWay?.reply && !message.text && !message.thought) {
    box.append(element("p", "waits", "Waiting for its first token …"));
  }
  message.pictures?.forEach((each, place) => box.append(picture(each, `Image ${place + 1}`)));
  box.append(text(message.text));
  if (message.error) box.append(element("p", "error", message.error));
  const foot = element("div", "foot");
  if (message.figures) foot.append(element("span", "figures-of-reply", message.figures));
  if (!underWay) {
    if (message.role === "user") foot.append(quiet("Edit", () => edit(number)));
    else if (number === messages.length - 1) foot.append(quiet("Regenerate", () => again(number)));
  }
  box.append(foot);
  return box;
}

/** Text as it is; what stands between fences in a box of its own. */
function text(content) {
  const box = element("div", "text");
  content.split(/^```.*\n?/m).forEach((part, number) => {
    if (number % 2) box.append(element("pre", "", element("code", "", part)));
    else if (part) box.append(part);
  });
  return box;
}

function picture(url, words) {
  const shown = element("img", "picture");
  shown.src = url;
  shown.alt = words;
  return shown;
}

function showPictures() {
  document.getElementById("pictures").replaceChildren(...pictures.map((each, number) => {
    const words = `Image ${number + 1}`;
    const remove = quiet("Remove", () => {
      pictures = pictures.filter((_url, place) => place !== number);
      showPictures();
      input.focus();
    });
    remove.setAttribute("aria-label", `Remove image ${number + 1}`);
    return element("li", "", picture(each, words), remove);
  }));
}

function add(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      pictures.push(reader.result);
      showPictures();
    });
    reader.readAsDataURL(file);
  }
}

function quiet(label, run) {
  const button = element("button", "quiet", label);
  button.type = "button";
  button.addEventListener("click", run);
  return button;
}

function edit(number) {
  input.value = messages[number].text;
  pictures = messages[number].pictures ?? [];
  showPictures();
  messages = messages.slice(0, number);
  show();
  input.focus();
}

function again(number) {
  messages = messages.slice(0, number);
  answer();
}

function question() {
  const options = { model: chosenModel(), stream: true, stream_options: { include_usage: true } };
  const temperature = document.getElementById("temperature").value;
  const most = document.getElementById("max-tokens").value;
  if (temperature !== "") options.temperature = Number(temperature);
  if (most !== "") options.max_tokens = Number(most);
  if (!canChat) {
    return ["v1/completions", { ...options, prompt: messages.map((each) => each.text).join("") }];
  }
  const said = messages.filter((each) => !each.error)
    .map((each) => ({ role: each.role, content: content(each) }));
  const system = document.getElementById("system").value.trim();
  if (system) said.unshift({ role: "system", content: system });
  return ["v1/chat/completions", { ...options, messages: said }];
}

function content({ text: said, pictures: seen }) {
  if (!seen?.length) return said;
  const parts = seen.map((url) => ({ type: "image_url", image_url: { url } }));
  return said ? [...parts, { type: "text", text: said }] : parts;
}

async function answer() {
  const [path, body] = question();
  const reply = { role: "assistant", text: "", thought: "", figures: "", error: "" };
  messages.push(reply);
  const mine = { reply, control: new AbortController() };
  underWay = mine;
  send.hidden = true;
  stop.hidden = false;
  const begunMs = performance.now();
  let firstMs = null;
  let lastMs = null;
  let usage = null;
  let pieces = 0;
  let isStopped = false;
  show();
  try {
    const got = await ask(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: mine.control.signal,
    });
    for await (const data of events(got)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      const said = choice.delta?.content ?? choice.text ?? "";
      const thought = choice.delta?.reasoning_content ?? "";
      if (!said && !thought) continue;
      lastMs = performance.now();
      firstMs ??= lastMs;
      pieces += 1;
      reply.text += said;
      reply.thought += thought;
      if (underWay !== mine) return; // another chat has begun
      const box = drawn(reply, messages.length - 1);
      const follows = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      log.lastElementChild.replaceWith(box);
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") isStopped = true;
    else reply.error = error.message;
  }
  if (underWay !== mine) return;
  underWay = null;
  reply.figures = [figures({ begunMs, firstMs, lastMs, pieces, usage }), isStopped ? "stopped" : ""]
    .filter(Boolean).join(", ");
  send.hidden = false;
  stop.hidden = true;
  show();
  input.focus();
}

function figures({ begunMs, firstMs, lastMs, pieces, usage }) {
  if (firstMs === null) return "";
  const tokens = usage?.completion_tokens ?? pieces;
  const told = [`${tokens} tokens`, `first after ${seconds((firstMs - begunMs) / 1e3)}`];
  if (usage) told.unshift(`prompt of ${usage.prompt_tokens}`);
  if (tokens > 8 && lastMs > firstMs) told.push(`${rate((1e3 * (tokens - 1)) / (lastMs - firstMs))} per second`);
  return told.join(", ");
}

document.getElementById("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const said = input.value;
  if (underWay || !(said.trim() || pictures.length)) return;
  input.value = "";
  messages.push({ role: "user", text: said, pictures });
  pictures = [];
  showPictures();
  answer();
});
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});
pictureInput.addEventListener("change", () => {
  add(pictureInput.files);
  pictureInput.value = "";
});
const form = document.getElementById("ask-form");
form.addEventListener("dragover", (event) => {
  if (readsPictures) event.preventDefault();
});
form.addEventListener("drop", (event) => {
  if (!readsPictures || !event.dataTransfer.files.length) return;
  event.preventDefault();
  add(event.dataTransfer.files);
});
input.addEventListener("paste", (event) => {
  if (readsPictures) add(event.clipboardData.files);
});
stop.addEventListener("click", () => underWay?.control.abort());
document.getElementById("clear").addEventListener("click", () => {
  underWay?.control.abort();
  underWay = null;
  send.hidden = false;
  stop.hidden = true;
  messages = [];
  pictures = [];
  show();
  showPictures();
});
