// The forms of the page about the API: sends a body, and shows the answer as it comes.
"use strict";

for (const form of document.querySelectorAll("form")) {
  const [body, button] = [form.querySelector("textarea"), form.querySelector("button")];
  const [status, shown] = [form.querySelector("[role=status]"), form.querySelector("pre")];
  let asked = null;

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (asked) return asked.abort();
    asked = new AbortController();
    button.textContent = "Stop";
    status.textContent = "Waiting …";
    shown.textContent = "";
    try {
      const options = { method: form.dataset.method, signal: asked.signal };
      if (body) {
        options.body = body.value;
        options.headers = { "content-type": "application/json" };
      }
      const reply = await fetch(form.dataset.path, options);
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        shown.textContent += part.value;
      }
      status.textContent = `Status ${reply.status}`;
      if (reply.headers.get("content-type").startsWith("application/json")) {
        shown.textContent = JSON.stringify(JSON.parse(shown.textContent), null, 1);
      }
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}`;
    } finally {
      asked = null;
      button.textContent = "Send";
    }
  });
}
