// Search and filters. The page reads in full without them; nothing that a run says is ever inserted as markup.
(() => {
  "use strict";
  const bar = document.querySelector("[role=search]");
  const box = bar.querySelector("input");
  const status = bar.querySelector("[role=status]");
  const buttons = [...bar.querySelectorAll("button")];
  const parts = [...document.querySelectorAll("[data-part]")];
  const rows = [...document.querySelectorAll(".grid tbody tr")];
  const texts = new Map();

  // Text is read when it is first searched: a page may have thousands of cells.
  const textOf = part => {
    if (!texts.has(part)) texts.set(part, part.textContent.toLowerCase());
    return texts.get(part);
  };

  const show = () => {
    const pressed = buttons.filter(one => one.getAttribute("aria-pressed") === "true").map(one => one.textContent);
    const words = [...box.value.split(/\s+/), ...pressed].filter(Boolean).map(word => word.toLowerCase());
    const found = {}, every = {};
    for (const part of parts) {
      const kind = part.dataset.part, matches = words.every(word => textOf(part).includes(word));
      part.classList.toggle("unfound", !matches);
      found[kind] = (found[kind] || 0) + matches;
      every[kind] = (every[kind] || 0) + 1;
    }
    for (const row of rows) {
      row.hidden = !!row.querySelector("[data-part]") && !row.querySelector("[data-part]:not(.unfound)");
    }
    const counts = Object.keys(every).map(kind => `${found[kind]} of ${every[kind]} ${kind}s`);
    status.textContent = words.length ? counts.join(", ") : "";
  };

  bar.hidden = parts.length === 0;
  box.addEventListener("input", show);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      show();
    });
  }
  document.addEventListener("keydown", event => {
    const open = event.key === "Escape" && document.querySelector(".square[open]");
    if (open) {
      open.open = false;
      open.querySelector("summary").focus();
    }
  });
})();
