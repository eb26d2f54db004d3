"use strict";
// The page: it sends the text as it is typed, and shows each sentence as the server answers.

const DELAY = 250; // milliseconds without a key before a text is sent
const ALTERNATIVES = 4;
const at = (id) => document.getElementById(id);
const text = at("text"), output = at("output"), mirror = at("mirror"), others = at("others");

let languages = [], limits = {}, sentences = [], after = "", chosen = null;
let timer = 0, running = null;

function headers() {
  const token = sessionStorage.getItem("token");
  return { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
}

function say(message, isError = false) {
  at("status").textContent = message;
  at("status").classList.toggle("error", isError);
}

async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
  at("access").hidden = response.status !== 403;
  throw Object.assign(new Error(answer.error), { retry: response.headers.get("Retry-After") });
}

function languageName(code) {
  try {
    return new Intl.DisplayNames(navigator.languages, { type: "language", fallback: "none" })
      .of(code.replace("_XX", "").replaceAll("_", "-")) ?? code;
  } catch {
    return code;
  }
}

function fill(select, codes, selected) {
  const names = codes.map((code) => [code, languageName(code)]).sort((a, b) => a[1].localeCompare(b[1]));
  select.replaceChildren(...names.map(([code, name]) => new Option(name, code, false, code === selected)));
  select.disabled = codes.length < 2;
}

async function start() {
  try {
    const [health, listed] = await Promise.all(["health", "languages"].map(async (path) => (await fetch(path)).json()));
    languages = listed;
    limits = health.limits;
    at("model").textContent = health.model;
    const sources = listed.filter((language) => language.targets.length);
    const targets = [...new Set(sources.flatMap((language) => language.targets))];
    fill(at("source"), sources.map((language) => language.code), health.source);
    fill(at("target"), targets, health.target ?? targets.find((code) => code !== at("source").value));
    at("swap").hidden = !sources.some((language) => targets.includes(language.code));
    if (text.value) translate();
  } catch {
    say("The server does not answer.", true);
  }
}

// Text

function later() {
  clearTimeout(timer);
  output.classList.add("old");
  show(null);
  timer = setTimeout(translate, DELAY);
}

async function translate() {
  clearTimeout(timer);
  running?.abort();
  const controller = (running = new AbortController()), begin = performance.now();
  if (!text.value.trim()) {
    sentences = [];
    after = "";
    render();
    return say("");
  }
  const received = [], warnings = [];
  try {
    const response = await post("translate", {
      q: text.value, source: at("source").value, target: at("target").value, stream: true,
      alternatives: Math.min(ALTERNATIVES, limits.beam_size - 1),
    }, controller.signal);
    let end = 0, last = "", complete = false;
    for await (const [name, data] of events(response)) {
      if (name === "error") throw new Error(data.error);
      if (name === "end") [last, complete] = [data.separators[0], true];
      if (name !== "sentence") continue;
      const place = text.value.indexOf(data.source, end);
      end = place + data.source.length;
      received.push({ ...data, place, all: [data.translatedText, ...data.alternatives] });
      if (data.warning) warnings.push(data.warning);
      [sentences, after] = [received, last];
      render();
    }
    if (!complete) throw new Error("The server ended before the translation.");
    [sentences, after] = [received, last];
    render();
    say(warnings.length ? warnings.join("; ") : `${Math.round(performance.now() - begin)} ms`, warnings.length > 0);
  } catch (error) {
    if (error.name === "AbortError") return;
    output.classList.add("old");
    say(error instanceof TypeError ? "The server does not answer." : error.message, true);
    if (error.retry) timer = setTimeout(translate, 1000 * error.retry);
  }
}

async function* events(response) {
  let buffer = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const [name, data] = part.split("\n").map((line) => line.slice(line.indexOf(" ") + 1));
      yield [name, JSON.parse(data)];
    }
  }
}

function render() {
  output.classList.remove("old");
  output.replaceChildren(...sentences.flatMap((sentence) => [sentence.separator, element(sentence)]), after);
  at("copy").disabled = !sentences.length;
  show(sentences.includes(chosen) ? chosen : null);
}

function element(sentence) {
  const span = Object.assign(document.createElement("span"), { className: "sentence", tabIndex: 0 });
  span.setAttribute("role", "button");
  let end = 0;
  // a word, or a character of a script without spaces
  for (const match of sentence.translatedText.matchAll(/[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]|[^\s\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]+/g)) {
    const word = Object.assign(document.createElement("span"), { className: "word", textContent: match[0] });
    const point = () => attend(sentence, match.index, match.index + match[0].length, word);
    word.addEventListener("pointerenter", point);
    word.addEventListener("click", point);
    word.addEventListener("pointerleave", clear);
    span.append(sentence.translatedText.slice(end, match.index), word);
    end = match.index + match[0].length;
  }
  span.append(sentence.translatedText.slice(end));
  span.addEventListener("click", () => show(sentence));
  span.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      show(sentence);
    }
  });
  sentence.span = span;
  return span;
}

// Other translations

function show(sentence) {
  chosen?.span?.classList.remove("chosen");
  chosen = sentence;
  others.hidden = !sentence || sentence.all.length < 2;
  if (!sentence) return;
  sentence.span.classList.add("chosen");
  const rows = sentence.all.map((line, i) => {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    const score = Object.assign(document.createElement("small"), { textContent: sentence.scores[i].toFixed(2) });
    button.append(line || "(empty)", score);
    button.addEventListener("click", () => {
      sentence.translatedText = line;
      sentence.attention = null;
      render();
    });
    const row = document.createElement("li");
    row.append(button);
    return row;
  });
  others.querySelector("ol").replaceChildren(...rows);
}

// Attention

let pointed = null;

async function attend(sentence, begin, end, word) {
  clear();
  pointed = word;
  word.classList.add("pointed");
  sentence.attention ??= post("attention", {
    q: sentence.source, translation: sentence.translatedText, source: at("source").value, target: at("target").value,
  }).then((response) => response.json()).then((answer) => answer.attention[0]);
  const attention = await sentence.attention.catch((error) => say(error.message, true));
  if (pointed !== word || !attention) return;
  // The server counts characters, and strings here have two elements for some.
  const characters = [...sentence.source];
  const [from, to] = [begin, end].map((index) => [...sentence.translatedText.slice(0, index)].length);
  const row = attention.translation.findIndex(([first, last]) => first < to && from < last);
  if (row < 0) return;
  const parts = [text.value.slice(0, sentence.place)];
  let done = 0;
  attention.source.forEach(([first, last], i) => {
    const mark = Object.assign(document.createElement("mark"), { textContent: characters.slice(first, last).join("") });
    mark.style.setProperty("--weight", attention.weights[row][i]);
    parts.push(characters.slice(done, first).join(""), mark);
    done = last;
  });
  const rest = characters.slice(done).join("") + text.value.slice(sentence.place + sentence.source.length);
  mirror.replaceChildren(...parts, rest + "\n");
}

function clear() {
  pointed?.classList.remove("pointed");
  pointed = null;
  mirror.replaceChildren(text.value + "\n"); // so that the field is as high as the text
}

text.addEventListener("input", () => { clear(); later(); });
for (const id of ["source", "target"]) at(id).addEventListener("change", translate);
at("swap").addEventListener("click", () => {
  const [source, target] = [at("source").value, at("target").value];
  [at("source").value, at("target").value] = [target, source];
  text.value = output.textContent;
  clear();
  translate();
});
at("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(output.textContent);
  say("Copied.");
});
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  at("access").hidden = true;
  translate();
});
clear();
start();
