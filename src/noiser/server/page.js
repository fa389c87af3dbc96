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
      control.value = values[index] ?? "";
    });
    if (value !== (START[name] ?? "") && name !== "model") controls[0]?.closest("details")?.setAttribute("open", "");
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

const LONG = 10; // seconds of work left that are announced, with quicker ways

function inWords(seconds) {
  if (seconds < 90) return `about ${5 * Math.ceil(seconds / 5)} s`;
  const [size, name] = [[86400, "days"], [3600, "hours"], [60, "minutes"]].find(([each]) => seconds >= 1.5 * each);
  return `about ${Math.round(seconds / size)} ${name}`;
}

function clock() { // a function that says how many seconds of work are left: as measured, or else as the server expects
  let first;
  return ({ label, share, seconds, expected }) => {
    if (share !== null && (!first || label !== first.label || share < first.share)) first = { label, share, seconds };
    const done = first ? share - first.share : 0, spent = first ? seconds - first.seconds : 0;
    if (done > 0 && share < 1 && spent > 1.5) return spent * (1 - share) / done;
    return expected ? expected - seconds : 0;
  };
}

function offerQuicker(question) { // the ways that are not taken already; sources and edits have none
  if (question.sources || question.before) return;
  for (const button of $("quicker").children) {
    const [name, value] = button.value.split("=");
    const taken = question[name] === value || (value === "auto" && !/[.!?\n]\s*\S/.test(question.prompt));
    button.hidden = taken || (value === "occlusion" && question.methods === "attn_lrp") || (value === "attn_lrp" && question.pictures);
  }
  $("quicker").hidden = [...$("quicker").children].every((button) => button.hidden);
}

const nth = (place) => ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"][place] ?? `number ${place + 1}`;

async function turn(signal) { // resolves to a function that ends it; a browser has six connections for all tabs:
  if (!navigator.locks) return () => {}; // one tab at a time uses one for a question
  const own = `noiser ${Math.random()}`, until = new AbortController();
  const hold = (name, options) => new Promise((begin, fail) =>
    navigator.locks.request(name, options, () => new Promise((end) => begin(end))).catch(fail));
  const leave = await hold(own, { signal }); // shows which of those who wait is this tab
  const tell = async () => {
    const { held, pending } = await navigator.locks.query();
    const { clientId } = held.find(({ name }) => name === own) ?? {};
    const place = pending.filter(({ name }) => name === "noiser").findIndex((each) => each.clientId === clientId);
    if (place >= 0 && !until.signal.aborted) say(`Waiting for another tab: ${nth(place + 1)} in line`, null);
  };
  const watch = setInterval(tell, 400);
  try {
    const end = await hold("noiser", { signal });
    return () => { end(); leave(); };
  } catch (error) {
    leave();
    throw error;
  } finally {
    until.abort();
    clearInterval(watch);
  }
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
  $("quicker").hidden = true;
  let release;
  try {
    release = await turn(mine.signal);
    say("Asking", null);
    const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
    const reply = await fetch(path, { method: "POST", headers, signal: mine.signal, body: JSON.stringify(question) });
    if (!reply.ok) return refuse(into, (await reply.json()).error.message);
    const secondsLeft = clock();
    for await (const [name, value] of events(reply.body)) {
      if (name === "error") return refuse(into, value.error.message);
      if (name === "answer") {
        into.innerHTML = value.html;
        warn(value.warnings ?? []);
        const [first] = value.saved ?? [], asked = first?.model ?? first?.attribution?.model;
        say(`Done in ${((performance.now() - began) / 1000).toFixed(1)} s${asked ? ` by ${asked.name}` : ""}.`);
        return value;
      }
      const share = value.share === null ? "" : `${Math.round(100 * value.share)} %, `;
      const left = secondsLeft(value);
      say(value.label, value.share, left > LONG ? `${inWords(left)} left` : `${share}${Math.round(value.seconds)} s`);
      if (left > LONG && path === "ask") offerQuicker(question);
    }
    refuse(into, "The server ended before it answered. Ask again.");
  } catch (error) {
    const text = `The server does not answer (${error.message}). Is it still running?`;
    if (mine === running) error.name === "AbortError" ? say("Stopped.") : refuse(into, text); // else another question runs
  } finally {
    release?.();
    into.classList.remove("busy");
    if (mine === running) $("quicker").hidden = true;
    if (mine === running) $("stop").disabled = true;
  }
}

function warn(texts) { // what the library warns of
  $("warnings").hidden = !texts.length;
  $("warnings").replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

const MOST_PICTURES = 4, LONGEST_SIDE = 1024; // of pictures that are sent, in pixels
let pictures = []; // {url, size, greyed: the boxes that are struck out}

async function addPictures(files) { // drawn no larger than needed, which also leaves out what a camera writes beside them
  for (const file of files) {
    if (pictures.length >= MOST_PICTURES) { warn([`At most ${MOST_PICTURES} pictures can be asked about.`]); break; }
    try {
      const image = await createImageBitmap(file), scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
      const canvas = Object.assign(document.createElement("canvas"), { width: Math.max(1, Math.round(image.width * scale)), height: Math.max(1, Math.round(image.height * scale)) });
      const pen = canvas.getContext("2d");
      pen.fillStyle = "white";
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, 0, 0, canvas.width, canvas.height);
      pictures.push({ url: canvas.toDataURL("image/jpeg", 0.92), size: [canvas.width, canvas.height], greyed: [] });
    } catch { warn([`${file.name} is not a picture that this browser can read.`]); }
  }
  showPictures();
}

function showPictures() {
  $("added").replaceChildren(...pictures.map(({ url, size: [width, height], greyed }, index) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "Take it out" });
    const shown = document.createElement("span");
    button.setAttribute("aria-label", `Take picture ${index + 1} out`);
    shown.append(Object.assign(new Image(), { src: url, alt: `picture ${index + 1}`, height: 48 }));
    for (const [left, top, right, bottom] of greyed) {
      const box = document.createElement("i");
      box.style.inset = [top / height, 1 - right / width, 1 - bottom / height, left / width].map((share) => `${100 * share}%`).join(" ");
      shown.append(box);
    }
    button.append(shown);
    button.addEventListener("click", () => { pictures = pictures.filter((_, other) => other !== index); showPictures(); });
    return button;
  }));
  if (pictures.length) $("added").closest("details").open = true;
  if (hasPictures()) markStruck();
}

const asked = () => ({ pictures: pictures.map(({ url }) => url), greyed: pictures.flatMap(({ greyed }, index) => greyed.map((box) => [index, ...box])) });

async function answer() {
  const question = Object.fromEntries(fields());
  if (pictures.length) Object.assign(question, asked());
  const found = await ask("ask", question, $("answer"));
  if (found) present(question, found.saved); // else the last one stays
}

function present(question, saved) { // what belongs to the answer that is now on the page
  for (const id of ["chart", "tested", "measured"]) $(id).replaceChildren();
  shown = { question, saved, struck: new Set(), prompt: question.prompt };
  Object.assign($("link"), { href: link(), hidden: link().length > 60000 }); // servers refuse longer addresses
  const text = JSON.stringify(saved.length === 1 ? saved[0] : saved, null, 1);
  $("save").href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  $("after").hidden = false;
  $("probes").hidden = Boolean(question.sources || question.before);
  if ($("probes").hidden) return;
  $("measure").closest("details").hidden = hasPictures(); // metrics read text alone
  document.querySelectorAll("#answer .map").forEach((map, number) => {
    unitsOf(map).forEach((unit, index) => Object.assign(unit, { role: "button", ariaPressed: "false",
      ariaLabel: `${unit.title}. Press to strike it out.`, tabIndex: index ? -1 : 0 })); // arrows go on
    const line = Object.assign(document.createElement("p"), { className: "word" });
    line.classList.toggle("far", map.offsetHeight > innerHeight / 2); // of a long text it stays in sight
    if (!number) line.textContent = "Point at a part, or tap it, to see what the model says without it. A click strikes it out"
      + (hasPictures() ? ", and makes a part of a picture grey." : ".");
    map.after(line);
  });
  markStruck();
}

// ---- words and regions that are struck out ----

const UNIT = ":is(.u, .spot)"; // a word, or a region of a picture above the words
const unitsOf = (map) => [...map.previousElementSibling?.matches(".pics") ? map.previousElementSibling.querySelectorAll(".spot") : [], ...map.querySelectorAll(".u")];
const mapOf = (element) => element.closest(".map") ?? element.closest(".pics").nextElementSibling;
const rowOf = (element) => [...element.closest("section").querySelectorAll(".map")].indexOf(mapOf(element));
const recordOf = (unit) => shown.saved[rowOf(unit)];
const lineOf = (unit) => mapOf(unit).nextElementSibling;
const spanOf = (unit) => { const { start, end } = recordOf(unit).units[+unit.dataset.unit]; return [start, end]; };

function contents(record) { // [place in the record's text, place in the form's prompt, length] of what the visitor wrote
  const text = [...record.text], typed = [...shown.prompt];
  if (typeof record.prompt === "string") return [[0, 0, record.prompt_length]];
  const find = (all, piece, from) => {
    for (let at = from; at <= all.length - piece.length; at++) if (piece.every((each, index) => each === all[at + index])) return at;
    return -1;
  };
  let inText = 0, inTyped = 0;
  const found = [], texts = record.prompt.flatMap(({ content }) => Array.isArray(content) ? content.map(({ text }) => text ?? "") : [content]);
  for (const each of texts) { // a message's, or a part's beside pictures
    const piece = [...String(each).trim()], places = [find(text, piece, inText), find(typed, piece, inTyped)];
    if (places[0] < 0) return [];
    inText = places[0] + piece.length;
    if (places[1] < 0) continue; // a message that the template adds
    inTyped = places[1] + piece.length;
    found.push([...places, piece.length]);
  }
  return found;
}

function placed(unit) { // where a unit stands in the form's prompt
  const [start, end] = spanOf(unit);
  for (const [inText, inTyped, length] of contents(recordOf(unit)))
    if (start < inText + length && end > inText)
      return [inTyped + Math.max(0, start - inText), inTyped + Math.min(length, end - inText)];
  return null;
}

function line(unit, ...more) { // under the heat map: what the model says without the unit
  const says = unit.title.split("\n")[0], text = document.createElement("span");
  text.textContent = (says[0].toUpperCase() + says.slice(1)).replaceAll(" %", "\u00a0%"); // the sign stays with its number
  lineOf(unit).replaceChildren(text, ...more.flatMap((each) => [" ", each]));
}

function button(text, act) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", act);
  return made;
}

const hasPictures = () => Boolean(shown?.saved[0]?.info?.images);

function boxOf(unit) { // a region's picture, of those in the form, and its pixels; null where the form has others now
  const { pictures: explained, boxes } = recordOf(unit).info.images, [picture, ...box] = boxes[unit.dataset.unit];
  const isSame = pictures.length === explained.length && asked().pictures.join() === shown.question.pictures?.join();
  return isSame ? [pictures[picture], box] : null;
}

function isStruck(unit) {
  if (!unit.matches(".spot")) return shown.struck.has(placed(unit)?.join());
  const [picture, box] = boxOf(unit) ?? [];
  return Boolean(picture?.greyed.some((each) => each.join() === box.join()));
}

function markStruck() {
  for (const each of document.querySelectorAll(`#answer ${UNIT}[role]`)) {
    each.classList.toggle("struck", isStruck(each));
    each.ariaPressed = String(isStruck(each));
  }
}

const askAgain = (text) => button(text, () => form.requestSubmit());

function strikeRegion(unit) { // out of its picture, where it is grey when the form is asked, or back into it
  const found = boxOf(unit);
  if (!found) return [];
  const [picture, box] = found, others = picture.greyed.filter((each) => each.join() !== box.join());
  picture.greyed = others.length < picture.greyed.length ? others : [...others, box];
  showPictures();
  const before = new Set((shown.question.greyed ?? []).map(String)), now = asked().greyed.map(String);
  const isNew = now.some((each) => !before.has(each)), isBack = now.length < before.size || [...before].some((each) => !now.includes(each));
  if (!isNew && !isBack) return [];
  return [askAgain(isBack ? "Ask again" : now.length > 1 ? "Ask with these parts grey" : "Ask with this part grey")];
}

function strikeWord(unit) { // out of the prompt in the form, or back into it
  const place = placed(unit), field = form.elements.prompt;
  if (place && (field.value === shown.prompt || field.value === shown.shorter)) { // the visitor has not changed it
    const key = place.join();
    if (!shown.struck.delete(key)) shown.struck.add(key);
    markStruck();
    const gone = [...shown.struck].map((span) => span.split(",").map(Number));
    const left = [...shown.prompt].filter((_, at) => !gone.some(([start, end]) => start <= at && at < end)).join("");
    shown.shorter = field.value = left.replace(/^ +/, "");
    if (shown.struck.size) return [askAgain(shown.struck.size > 1 ? "Ask without them" : "Ask without it")];
  }
  return [];
}

function strike(unit) {
  const more = unit.matches(".spot") ? strikeRegion(unit) : strikeWord(unit);
  if (recordOf(unit).without === null) more.push(button("What does the model say without each?", runWithout));
  if (!hasPictures()) more.push(button("How much noise does it stand?", () => tolerate(unit)));
  line(unit, ...more);
}

const again = () => { // of the question that was asked: answers hold no more than previews of their pictures
  const { model, prompt, pictures, greyed } = shown.question;
  return hasPictures() ? { model, prompt, pictures, greyed } : { model };
};

async function runWithout() { // for methods that do not run the model without each word
  const { question, saved } = shown;
  const found = await ask("without", { ...again(), answers: saved }, $("answer"));
  if (!found) return;
  if (form.elements.prompt.value === shown.shorter) form.elements.prompt.value = question.prompt; // nothing is struck out now
  present(question, found.saved);
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
  copy.querySelectorAll(".word").forEach((each) => each.remove()); // it is for the pointer
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
  await ask(path, { ...again(), ...question }, into) && into.scrollIntoView({ block: "nearest" });

const targetOf = (section) => section.className.slice(1) - 1;
const foremost = () => [...document.querySelectorAll("#answer section")].find((each) => each.offsetParent);

const tolerate = (unit) =>
  probe("tolerate", { answer: recordOf(unit), unit: +unit.dataset.unit, target: targetOf(unit.closest("section")) }, $("chart"));

async function findRule() { // a line under the heat map that is on top, and rings around its units
  const section = foremost(), map = section.querySelector(".map"), line = document.createElement("div");
  section.querySelector(".ruled")?.remove();
  for (const unit of unitsOf(map)) unit.classList.remove("r", "r1", "r2", "r3", "against", "numbered");
  line.className = "ruled";
  lineOf(map).after(line); // the line of the word pointed at stays next to the map
  const question = { ...again(), answer: shown.saved[rowOf(map)], target: targetOf(section), seed: shown.question.seed };
  const found = await ask("findrule", question, line);
  const at = (index) => unitsOf(map).find((unit) => +unit.dataset.unit === +index);
  for (const [unit, ring] of Object.entries(found?.rings ?? {})) at(unit)?.classList.add(...ring.split(" "));
  for (const [, number] of line.textContent.matchAll(/\[(\d+)\]/g)) { // the parts that the line names by number
    const unit = at(number - 1);
    unit?.classList.add("numbered");
    if (unit) unit.dataset.number = number;
  }
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
$("test").addEventListener("submit", (event) => {
  event.preventDefault();
  probe("test", { answers: shown.saved, target: targetOf(foremost()) }, $("tested"));
});
$("quicker").addEventListener("click", ({ target }) => {
  if (!target.value) return;
  const [name, value] = target.value.split("="), [first, ...others] = form.querySelectorAll(`[name=${name}]`);
  offer(first, value);
  first.value = value;
  for (const other of others) other.value = ""; // no method beside it
  form.requestSubmit();
});
$("files").addEventListener("change", async ({ target }) => { // each a source with the file's name as its title
  const texts = await Promise.all([...target.files].map(async (file) =>
    `--- ${file.name}\n${(await file.text()).trim().replace(/^-{3,}/gm, " $&")}`)); // its own rules are no ends of a source
  const field = form.elements.sources;
  field.value = [field.value.trim(), ...texts].filter(Boolean).join("\n");
  target.value = "";
});
$("pictures").addEventListener("change", async ({ target }) => {
  await addPictures([...target.files]);
  target.value = "";
});
form.elements.prompt.addEventListener("paste", (event) => {
  const files = [...event.clipboardData?.files ?? []].filter((file) => file.type.startsWith("image/"));
  if (files.length) event.preventDefault() || addPictures(files);
});
const unitOf = ({ target }) => target.closest?.(`#answer ${UNIT}[role]`);
$("answer").addEventListener("click", (event) => unitOf(event) && strike(unitOf(event)));
for (const kind of ["mouseover", "focusin"]) $("answer").addEventListener(kind, (event) => {
  const unit = unitOf(event);
  if (unit && !lineOf(unit).querySelector("button")) line(unit); // what was clicked stays, with its buttons
});
$("answer").addEventListener("keydown", (event) => {
  const unit = event.target.closest(`${UNIT}[role]`), all = unit ? unitsOf(mapOf(unit)) : [];
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const next = step ? all[all.indexOf(unit) + step] : { Home: all[0], End: all.at(-1) }[event.key];
  if (unit && (event.key === "Enter" || event.key === " ")) strike(unit);
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
