// Tips under the pointer and by focus, arrow keys in a heat map, and files that never touch the server's disk.
const noiserPage = (() => {
  const TIPPED = ".noiser-att .u, .noiser-att [data-tip]";
  const tip = document.createElement("div");
  tip.id = "noiser-tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  let shown = null;

  const text = (of) => of.dataset.tip ?? of.getAttribute("title") ?? of.dataset.title ?? "";

  function show(of) {
    if (shown === of) return;
    hide();
    const said = text(of);
    if (!said) return;
    if (of.hasAttribute("title")) { // the browser's own tip would come on top of ours
      of.dataset.title = said;
      of.removeAttribute("title");
    }
    if (!tip.isConnected) document.body.append(tip);
    tip.textContent = said;
    tip.hidden = false;
    of.setAttribute("aria-describedby", tip.id);
    shown = of;
    place();
  }

  function place() {
    if (!shown) return;
    const of = shown;
    const box = of.getClientRects()[0] ?? of.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight;
    tip.style.left = Math.max(4, Math.min(box.left, innerWidth - own.width - 4)) + "px";
    tip.style.top = (below ? box.bottom + 6 : box.top - own.height - 6) + "px";
  }

  function hide() {
    if (!shown) return;
    if (shown.dataset.title) {
      shown.setAttribute("title", shown.dataset.title);
      delete shown.dataset.title;
    }
    shown.removeAttribute("aria-describedby");
    tip.hidden = true;
    shown = null;
  }

  const tipped = (event) => event.target instanceof Element && event.target.closest(TIPPED);
  document.addEventListener("mouseover", (event) => { const of = tipped(event); of ? show(of) : hide(); });
  document.addEventListener("focusin", (event) => { const of = tipped(event); of ? show(of) : hide(); });
  document.addEventListener("focusout", hide);
  addEventListener("scroll", place, true);
  addEventListener("resize", place);

  // A heat map is one stop of the Tab key; arrows, Home and End go through it.
  const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const at = tipped(event);
    const group = at && at.closest(".map, .chart");
    if (!group || event.ctrlKey || event.altKey || event.metaKey) return;
    const all = [...group.querySelectorAll(".u, [data-tip]")];
    const rightToLeft = group.matches(".map") && getComputedStyle(group).direction === "rtl";
    const move = (MOVES[event.key] ?? 0) * (rightToLeft && /Left|Right/.test(event.key) ? -1 : 1);
    const next = move ? all[all.indexOf(at) + move] : { Home: all[0], End: all.at(-1) }[event.key];
    if (!next) return;
    event.preventDefault();
    all.forEach((one) => one.setAttribute("tabindex", one === next ? "0" : "-1"));
    next.focus();
  });

  new MutationObserver(() => {
    if (shown && !shown.isConnected) hide();
    for (const map of document.querySelectorAll(".noiser-att .map")) {
      const all = map.querySelectorAll(".u[tabindex='0']");
      if (all.length > 1) all.forEach((one, index) => index && one.setAttribute("tabindex", "-1"));
    }
    for (const unit of document.querySelectorAll("#noiser-result .u:not([role])")) {
      unit.setAttribute("role", "button"); // here a click does something; in a saved page it does not
      unit.setAttribute("aria-label", unit.textContent + ": how much noise it tolerates");
    }
  }).observe(document.documentElement, { childList: true, subtree: true });

  // Gradio's <base> makes "#..." of a citation the address of another page, which would be loaded in place of this one.
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element && event.target.closest('.noiser-att a[href^="#"]');
    const target = link && document.getElementById(link.getAttribute("href").slice(1));
    if (!target) return;
    event.preventDefault();
    location.hash = target.id; // `:target` marks it
    target.scrollIntoView({ block: "nearest" }); // also the second time
  });

  // A click, Enter or the space bar on a unit of the heat map asks how much noise it tolerates.
  function onPick(element, report) {
    const pick = (unit) => {
      const row = [...unit.closest("section").classList].find((name) => /^t\d+$/.test(name));
      report({ unit: Number(unit.dataset.unit), row: Number(row.slice(1)) - 1 });
    };
    element.addEventListener("click", (event) => {
      const unit = event.target.closest(".u[data-unit]");
      if (unit) pick(unit);
    });
    element.addEventListener("keydown", (event) => {
      const unit = event.target.closest(".u[data-unit]");
      if (unit && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); pick(unit); }
    });
  }

  // The question that the page was opened with. None inside a frame: another site's page must not ask by itself.
  const search = () => (window.top === window ? location.search : "");

  // The link, which becomes the page's address too; servers refuse addresses of more than 65,536 characters.
  function link(query) {
    if (!query) return "";
    if (query.length > 60000) return "Too long for a link: keep the answer as JSON or HTML.";
    const own = [...new URLSearchParams(location.search)].filter(([name]) => name.startsWith("__"));
    const all = [query, new URLSearchParams(own).toString()].filter(Boolean).join("&");
    history.replaceState(history.state, "", location.pathname + "?" + all);
    return location.origin + location.pathname + "?" + query;
  }

  function download(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // `packed` is JSON; what is returned empties the component that carried it.
  function saveFile(packed) {
    if (packed) {
      const file = JSON.parse(packed);
      download(file.name, new Blob([file.text], { type: file.media_type }));
    }
    return "";
  }

  // To the clipboard; where the browser has none for this page, as a file.
  async function copyText(packed) {
    if (!packed) return "";
    try { await navigator.clipboard.writeText(JSON.parse(packed).text); } catch { saveFile(packed); }
    return "";
  }

  // The heat map as it is on the page, drawn by the browser that shows it: same fonts, same direction of the text.
  async function savePicture() {
    const card = document.querySelector("#noiser-result .noiser-att");
    if (!card) return;
    const { width, height } = card.getBoundingClientRect();
    const scale = Math.min(2, 16000 / Math.max(width, height));
    const copy = card.cloneNode(true);
    const checked = [...card.querySelectorAll("input")].map((input) => input.checked);
    copy.querySelectorAll("input").forEach((input, index) => input.toggleAttribute("checked", checked[index]));
    copy.style.cssText = `width:${width}px;margin:0;max-width:none;color-scheme:${getComputedStyle(card).colorScheme}`;
    const styles = [...document.querySelectorAll("#noiser-result style")].map((style) => style.cloneNode(true));
    const body = document.createElement("div");
    body.append(...styles, copy);
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width * scale}" height="${height * scale}"
      viewBox="0 0 ${width} ${height}"><foreignObject width="100%" height="100%">${
      new XMLSerializer().serializeToString(body)}</foreignObject></svg>`;
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    canvas.getContext("2d").drawImage(image, 0, 0);
    canvas.toBlob((blob) => download("noiser.png", blob), "image/png");
  }

  return { copyText, link, onPick, saveFile, savePicture, search };
})();
