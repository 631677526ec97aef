// A conversation: streamed, stopped, asked again, edited. It is kept in this page alone.

import { ask, element, events, rate, seconds } from "./api.js";
import { chosenModel } from "./models.js";

const log = document.getElementById("log");
const input = document.getElementById("ask");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

/** Each {role, text}; those of the assistant with a thought, figures, an error. */
let messages = [];
let underWay = null;
let canChat = true;

export function setCanChat(can) {
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

function quiet(label, run) {
  const button = element("button", "quiet", label);
  button.type = "button";
  button.addEventListener("click", run);
  return button;
}

function edit(number) {
  input.value = messages[number].text;
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
  const said = messages.filter((each) => !each.error).map(({ role, text: content }) => ({ role, content }));
  const system = document.getElementById("system").value.trim();
  if (system) said.unshift({ role: "system", content: system });
  return ["v1/chat/completions", { ...options, messages: said }];
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
  if (underWay || !said.trim()) return;
  input.value = "";
  messages.push({ role: "user", text: said });
  answer();
});
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});
stop.addEventListener("click", () => underWay?.control.abort());
document.getElementById("clear").addEventListener("click", () => {
  underWay?.control.abort();
  underWay = null;
  send.hidden = false;
  stop.hidden = true;
  messages = [];
  show();
});
