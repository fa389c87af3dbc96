// The form as a question, its answer as events; a link is the form's fields. Nothing but the link outlives the page.
const $ = (id) => document.getElementById(id);
const form = $("question");
const START = Object.fromEntries(fields());
let running = null; // aborts the request under way
let shown = null; // {model, seed, saved} of the answer on the page

function fields() {
  const data = new FormData(form);
  data.set("methods", [...new Set(data.getAll("methods").filter(Boolean))].join(","));
  return [...data].filter(([, value]) => value !== "");
}

const changed = () => new URLSearchParams(fields().filter(([name, value]) => name === "prompt" || value !== START[name]));

function restore(link) {
  for (const [name, value] of link) {
    if (!Object.hasOwn(START, name) && !form.elements[name]) continue;
    const names = name === "methods" ? value.split(",") : [value];
    const controls = [...form.querySelectorAll(`[name="${CSS.escape(name)}"]`)];
    while (controls.length < names.length) { // more methods than the form has fields for
      const label = controls.at(-1).parentNode.cloneNode(true);
      controls.at(-1).parentNode.after(label);
      controls.push(label.querySelector("select"));
    }
    names.forEach((each, index) => {
      const control = controls[index];
      if (control.type === "checkbox") control.checked = each === "1";
      else choose(control, each);
      if (each !== (START[name] ?? "")) control.closest("details")?.setAttribute("open", "");
    });
  }
}

function choose(control, value) {
  if (control.options && ![...control.options].some((option) => option.value === value)) control.add(new Option(value));
  control.value = value;
}

async function fill(path, name, text) { // a select's options; what is chosen stays
  const { data } = await (await fetch(path)).json();
  for (const control of form.querySelectorAll(`[name="${name}"]`)) {
    if (name === "model") { control.options[0].text = data[0].id; }
    for (const each of data) {
      let option = [...control.options].find((one) => one.value === each.id);
      if (!option) control.add(option = new Option(each.id));
      option.title = text(each);
    }
  }
  return data;
}

function say(text, share, numbers = "") {
  const [label, bar] = $("status").children;
  if (label.textContent !== text) label.textContent = text; // read out when it changes
  bar.hidden = share === undefined;
  if (share === null || share === undefined) bar.removeAttribute("value"); else bar.value = share;
  $("numbers").textContent = numbers;
}

function refuse(into, { message }) {
  const line = Object.assign(document.createElement("p"), { className: "error", textContent: message });
  line.setAttribute("role", "alert");
  into.replaceChildren(line);
  say("");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [, name, data] = part.match(/^event: (\w+)\ndata: (.*)$/);
      yield [name, JSON.parse(data)];
    }
  }
}

async function ask(path, question, into) { // what is answered, or null
  running?.abort();
  const mine = running = new AbortController();
  $("stop").disabled = false;
  into.classList.add("busy");
  say("Asking", null);
  try {
    const options = { method: "POST", signal: mine.signal, headers: { "Content-Type": "application/json" } };
    const reply = await fetch(path, { ...options, body: JSON.stringify(question) });
    if (!reply.ok) return refuse(into, (await reply.json()).error);
    for await (const [name, value] of events(reply.body)) {
      if (name === "progress") {
        const share = value.share === null ? "" : `${Math.round(100 * value.share)} %, `;
        say(value.label, value.share, `${share}${Math.round(value.seconds)} s`);
      } else if (name === "error") return refuse(into, value.error);
      else {
        into.innerHTML = value.html;
        say(`Done in ${value.seconds.toFixed(1)} s.`);
        return value;
      }
    }
    refuse(into, { message: "The server ended before it answered. Ask again." });
  } catch (error) {
    if (mine !== running) return null; // another question has taken its place
    if (error.name === "AbortError") say("Stopped.");
    else refuse(into, { message: `The server does not answer (${error.message}). Is it still running?` });
  } finally {
    into.classList.remove("busy");
    if (mine === running) $("stop").disabled = true;
  }
  return null;
}

async function answer() {
  const question = Object.fromEntries(fields());
  for (const id of ["chart", "measured"]) $(id).replaceChildren();
  $("after").hidden = true;
  const found = await ask("ask", question, $("answer"));
  if (!found) return;
  shown = { model: question.model, seed: question.seed, saved: found.saved };
  const link = `?${changed()}`;
  $("link").hidden = link.length > 60000; // servers refuse longer addresses
  $("link").href = link;
  $("after").hidden = false;
  $("probes").hidden = Boolean(question.sources);
  for (const map of document.querySelectorAll("#answer .map")) {
    map.querySelectorAll(".u").forEach((unit, index) => {
      if (question.sources) return;
      unit.setAttribute("role", "button");
      unit.setAttribute("aria-label", `${unit.textContent}: how much noise it tolerates`);
      unit.tabIndex = index ? -1 : 0; // one stop of the Tab key; arrows go on
    });
  }
}

function tolerate(unit) {
  const target = [...unit.closest("section").classList].find((name) => /^t\d+$/.test(name)).slice(1) - 1;
  const rows = [...unit.closest("section").querySelectorAll(".map")];
  const att = shown.saved[rows.indexOf(unit.closest(".map"))];
  ask("tolerate", { model: shown.model, answer: att, unit: Number(unit.dataset.unit), target }, $("chart"));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  $("example").hidden = true;
  history.replaceState(null, "", `?${changed()}`.slice(0, 60000));
  answer();
});
form.elements.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("measure").addEventListener("submit", (event) => {
  event.preventDefault();
  const metrics = new FormData($("measure")).getAll("metrics");
  ask("measure", { model: shown.model, answers: shown.saved, metrics, seed: shown.seed }, $("measured"));
});
$("save").addEventListener("click", () => {
  const text = JSON.stringify(shown.saved.length === 1 ? shown.saved[0] : shown.saved, null, 1);
  const link = Object.assign(document.createElement("a"), { download: "noiser.json" });
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.click();
});
$("answer").addEventListener("click", (event) => {
  const unit = event.target.closest(".u[role=button]");
  if (unit) tolerate(unit);
});
const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
$("answer").addEventListener("keydown", (event) => {
  const unit = event.target.closest(".u[role=button]");
  if (!unit) return;
  const all = [...unit.closest(".map").querySelectorAll(".u")];
  const next = MOVES[event.key] ? all[all.indexOf(unit) + MOVES[event.key]] : { Home: all[0], End: all.at(-1) }[event.key];
  if (event.key === "Enter" || event.key === " ") tolerate(unit);
  else if (next) { unit.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  else return;
  event.preventDefault();
});

const link = new URLSearchParams(location.search);
restore(link);
$("example").hidden = link.has("prompt");
answer();
fill("v1/methods", "methods", (method) => method.summary);
fill("v1/models", "model", () => "").then((models) => {
  for (const example of document.querySelectorAll("a[data-model]")) { // a model that is not there: ask the first
    const query = new URLSearchParams(example.search);
    if (!models.some((model) => model.id === query.get("model"))) query.delete("model");
    example.search = query;
  }
});
