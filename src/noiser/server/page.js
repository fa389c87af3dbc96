// The form is the question, its answer comes as events, and a link holds the form's fields. Nothing else is kept.
const $ = (id) => document.getElementById(id);
const form = $("question");
const START = Object.fromEntries(fields());
let running, shown, place = location.search; // the request under way, {question, saved} of the answer on the page, its link

function fields() {
  const data = new FormData(form);
  data.set("methods", data.getAll("methods").filter(Boolean).join(","));
  return [...data].filter(([, value]) => value !== "");
}

const link = () => "?" + new URLSearchParams(fields().filter(([name, value]) => name === "prompt" || value !== START[name]));

function restore(asked) {
  for (const [name, value] of asked) {
    const controls = [...form.querySelectorAll(`[name="${CSS.escape(name)}"]`)];
    const values = name === "methods" ? value.split(",") : [value];
    while (controls.length && controls.length < values.length) { // more methods than fields
      const label = controls.at(-1).parentNode.cloneNode(true);
      controls.at(-1).parentNode.after(label);
      controls.push(label.lastElementChild);
    }
    controls.forEach((control, index) => {
      if (control.options) offer(control, values[index] ?? "");
      if (control.type === "checkbox") control.checked = value === "1";
      else control.value = values[index] ?? "";
    });
    if (value !== (START[name] ?? "")) controls[0]?.closest("details")?.setAttribute("open", "");
  }
}

function offer(control, value, summary) {
  let option = [...control.options].find((each) => each.value === value);
  if (!option) control.add(option = new Option(value));
  if (summary) Object.assign(option, { value, text: `${value}: ${summary}` });
}

async function fill(path, name) { // a select's options, each with a line about it; what is chosen stays
  const { data } = await (await fetch(path)).json();
  for (const control of form.querySelectorAll(`[name="${name}"]`)) data.forEach(({ id, summary }) => offer(control, id, summary));
  return data.map(({ id }) => id);
}

function say(text, share, numbers = "") {
  const [label, bar] = $("status").children;
  if (label.textContent !== text) label.textContent = text; // read out when it changes
  bar.hidden = share === undefined;
  if (share === null) bar.removeAttribute("value"); else bar.value = share ?? 0;
  $("numbers").textContent = numbers;
}

function refuse(into, message) { // an answer that is there stays
  into.querySelector(".error")?.remove();
  into.prepend(Object.assign(document.createElement("p"), { className: "error", role: "alert", textContent: message }));
  say("");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", step; !(step = await reader.read()).done;) {
    const parts = (rest + step.value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, name, data] = part.match(/^event: (\w+)\ndata: (.*)$/);
      yield [name, JSON.parse(data)];
    }
  }
}

async function ask(path, question, into) { // what is answered, if it is
  running?.abort();
  const mine = running = new AbortController(), began = performance.now();
  $("stop").disabled = false;
  into.classList.add("busy");
  say("Waiting for another tab", null);
  let release; // a browser has six connections for all tabs: one tab at a time uses one for a question
  try {
    await new Promise((begin, fail) => !navigator.locks ? begin() : navigator.locks.request("noiser", { signal: mine.signal },
      () => new Promise((end) => { release = end; begin(); })).catch(fail));
    say("Asking", null);
    const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
    const reply = await fetch(path, { method: "POST", headers, signal: mine.signal, body: JSON.stringify(question) });
    if (!reply.ok) return refuse(into, (await reply.json()).error.message);
    for await (const [name, value] of events(reply.body)) {
      if (name === "error") return refuse(into, value.error.message);
      if (name === "answer") {
        into.innerHTML = value.html;
        say(`Done in ${((performance.now() - began) / 1000).toFixed(1)} s.`);
        return value;
      }
      const share = value.share === null ? "" : `${Math.round(100 * value.share)} %, `, left = value.seconds * (1 / value.share - 1) / 60;
      const advice = value.seconds > 3 && value.share && left > 2 ? `; about ${Math.round(left)} minutes left` : "";
      const quicker = advice && path === "ask" && !question.sources ? ". Quicker: larger units, or the method occlusion" : "";
      say(value.label, value.share, `${share}${Math.round(value.seconds)} s${advice}${quicker}`);
    }
    refuse(into, "The server ended before it answered. Ask again.");
  } catch (error) {
    const text = `The server does not answer (${error.message}). Is it still running?`;
    if (mine === running) error.name === "AbortError" ? say("Stopped.") : refuse(into, text); // else another question runs
  } finally {
    release?.();
    into.classList.remove("busy");
    if (mine === running) $("stop").disabled = true;
  }
}

async function answer() {
  const question = Object.fromEntries(fields());
  const found = await ask("ask", question, $("answer"));
  if (!found) return; // the last one stays
  for (const id of ["chart", "measured"]) $(id).replaceChildren();
  shown = { question, saved: found.saved };
  Object.assign($("link"), { href: link(), hidden: link().length > 60000 }); // servers refuse longer addresses
  const text = JSON.stringify(found.saved.length === 1 ? found.saved[0] : found.saved, null, 1);
  $("save").href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  $("after").hidden = false;
  $("probes").hidden = Boolean(question.sources || question.before);
  for (const map of document.querySelectorAll("#answer .map")) {
    map.querySelectorAll(".u").forEach((unit, index) => Object.assign(unit, { role: "button",
      ariaLabel: `${unit.textContent}: how much noise it tolerates`, tabIndex: index ? -1 : 0 })); // arrows go on
  }
}

function download(name, content) {
  const url = URL.createObjectURL(content);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

async function text(form) { // as the library writes it
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch("keep", { method: "POST", headers, body: JSON.stringify({ answers: shown.saved, form }) });
  const value = await reply.json();
  if (!reply.ok) throw new Error(value.error.message);
  return new Blob([value.text], { type: `text/${form}` });
}

async function picture(element) { // as it stands on the page, on white, by an SVG that holds the element and its styles
  const { width, height } = element.getBoundingClientRect(), size = Math.min(2, 16000 / height);
  const copy = element.cloneNode(true), inputs = element.querySelectorAll("input");
  copy.querySelectorAll("input").forEach((each, index) => each.toggleAttribute("checked", inputs[index].checked));
  const style = document.createElement("style"), frame = document.createElement("div");
  style.textContent = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText)).join("\n");
  frame.style.font = getComputedStyle(element).font;
  frame.dataset.theme = "light"; // whatever the visitor's scheme: it goes into a report
  frame.append(style, copy);
  const inside = new XMLSerializer().serializeToString(frame);
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" style="color-scheme: light" width="${width}" height="${height}">`
    + `<foreignObject width="100%" height="100%">${inside}</foreignObject></svg>`;
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: size * width, height: size * height });
  const brush = canvas.getContext("2d");
  brush.fillStyle = "#fff";
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(image, 0, 0, canvas.width, canvas.height);
  const content = await new Promise((done) => canvas.toBlob(done));
  if (!content) throw new Error("The answer is too long for a picture. Save it as HTML.");
  return content;
}

async function keep(form) {
  const names = { png: "noiser.png", html: "noiser.html", markdown: "noiser.md" };
  try {
    download(names[form], form === "png" ? await picture($("answer")) : await text(form));
  } catch (error) {
    refuse($("answer"), error.message);
  }
}

const probe = async (path, question, into) =>
  await ask(path, { model: shown.question.model, ...question }, into) && into.scrollIntoView({ block: "nearest" });

function tolerate(unit) {
  const section = unit.closest("section"), row = [...section.querySelectorAll(".map")].indexOf(unit.closest(".map"));
  probe("tolerate", { answer: shown.saved[row], unit: +unit.dataset.unit, target: section.className.slice(1) - 1 }, $("chart"));
}

async function findRule() { // a line under the heat map that is on top, and rings around its units
  const section = [...document.querySelectorAll("#answer section")].find((each) => each.offsetParent);
  const map = section.querySelector(".map"), line = document.createElement("div");
  section.querySelector(".ruled")?.remove();
  for (const unit of map.querySelectorAll(".r")) unit.classList.remove("r", "r1", "r2", "r3", "against");
  line.className = "ruled";
  map.after(line);
  const row = [...section.querySelectorAll(".map")].indexOf(map), target = section.className.slice(1) - 1;
  const question = { model: shown.question.model, answer: shown.saved[row], target, seed: shown.question.seed };
  const found = await ask("findrule", question, line);
  for (const [unit, ring] of Object.entries(found?.rings ?? {}))
    map.querySelector(`[data-unit="${unit}"]`)?.classList.add(...ring.split(" "));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  $("example").hidden = true;
  if (link().length < 60000 && link() !== place) history.pushState(null, "", place = link());
  answer();
  $("status").scrollIntoView({ block: "nearest" }); // on a phone it is below the form
});
form.elements.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.shiftKey) event.preventDefault() || form.requestSubmit();
});
$("keep").addEventListener("click", ({ target }) => target.value && keep(target.value));
$("stop").addEventListener("click", () => running?.abort());
$("measure").addEventListener("submit", (event) => {
  event.preventDefault();
  const { saved, question } = shown, metrics = [$("measure").elements.metrics.value];
  probe("measure", { answers: saved, metrics, seed: question.seed }, $("measured"));
});
$("rule").addEventListener("submit", (event) => event.preventDefault() || findRule());
$("answer").addEventListener("click", ({ target }) => target.closest(".u[role]") && tolerate(target.closest(".u")));
$("answer").addEventListener("keydown", (event) => {
  const unit = event.target.closest(".u[role]"), all = [...unit?.closest(".map").querySelectorAll(".u") ?? []];
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const next = step ? all[all.indexOf(unit) + step] : { Home: all[0], End: all.at(-1) }[event.key];
  if (unit && (event.key === "Enter" || event.key === " ")) tolerate(unit);
  else if (next) { unit.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  else return;
  event.preventDefault();
});

addEventListener("popstate", () => location.search === place || location.reload()); // not for a source's place on the page
restore(new URLSearchParams(location.search));
$("example").hidden = location.search.includes("prompt=");
const foreign = "foreign" in document.body.dataset || (document.referrer && new URL(document.referrer).origin !== location.origin);
if (foreign && location.search) say("Another site opened this link. Press Ask to answer its question."); else answer();
fill("v1/methods", "methods");
fill("v1/models", "model").then((models) => {
  form.elements.model.options[0].text = models[0];
  for (const each of document.querySelectorAll("a[data-model]")) each.hidden = !models.includes(each.dataset.model);
});
