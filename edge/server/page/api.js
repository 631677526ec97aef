// Talking with the server that this page came from.

const KEY = "edge-api-key";

/** Told when the server wants a key that this tab does not have. */
export const needsKey = new EventTarget();

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** An answer of the server; throws an Error with its sentence where it refuses. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) needsKey.dispatchEvent(new Event("asked"));
  let told = null;
  try {
    told = (await answer.json()).error;
  } catch { /* no JSON */ }
  throw new Error(told?.message ?? told ?? `the server says ${answer.status}`);
}

export async function askJson(path) {
  return (await ask(path)).json();
}

/** The data of server-sent events, as they come. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** An element with a class, a text and children. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toFixed(count < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

export function seconds(value) {
  if (value >= 1) return `${value.toFixed(1)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

/** A predicted rate with its spread: "57–62", or one number where nothing is spread. */
export function predictedRate({ tokens_per_s: one, tokens_per_s_range: span }) {
  const [low, high] = span.map(rate);
  return low === high ? rate(one) : `${low}–${high}`;
}

export function rate(tokensPerSecond) {
  if (tokensPerSecond === null || tokensPerSecond === undefined) return "–";
  if (tokensPerSecond > 0 && tokensPerSecond < 1) return `${Number(tokensPerSecond.toPrecision(2))}`;
  return tokensPerSecond.toFixed(tokensPerSecond < 10 ? 1 : 0);
}
