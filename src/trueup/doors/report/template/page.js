"use strict";
// The look (light, dark, print), the copy button and the tree. `repaint` listeners repaint what CSS cannot reach.
// What is compressed in the page is unpacked here: the library's scripts (`library`), and columns (`calls`).
window.trueup = { repaint: [] };
(() => {
  const held = (id) => { const found = document.getElementById(id); return found ? JSON.parse(found.textContent) : null; };
  const inflate = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
  };
  const unpack = async ({ kind, data, values }) => {
    const buffer = await inflate(data).arrayBuffer();
    return { values, at: kind === "float32" ? new Float32Array(buffer) : new Int32Array(buffer) };
  };
  const once = (make) => { let made; return () => (made ??= make()); };
  window.trueup.library = once(async () => {
    for (const text of await Promise.all((held("library") ?? []).map((part) => inflate(part).text()))) {
      const script = document.createElement("script");
      script.textContent = text;
      document.head.append(script);
    }
  });
  window.trueup.model = async (id) => JSON.parse(await inflate(held(id)).text()); // of a chart
  window.trueup.calls = once(async () => {
    const { rows, total, columns } = held("calls-data"), found = { rows, total, column: {} };
    await Promise.all(Object.entries(columns).map(async ([name, packed]) => { found.column[name] = await unpack(packed); }));
    return found;
  });
  // Numbers as everywhere in Trueup: two digits, no plus, no trailing zero.
  window.trueup.sci = (value) => {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : value > 0 ? "inf" : "-inf";
    return value === 0 ? "0" : value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  };
})();
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(dark()));
    button.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} look`);
    window.trueup.repaint.forEach((paint) => paint());
  };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; show(); });
  system.addEventListener("change", show);
  let before;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; show(); });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    show();
  });
  if (!document.getElementById("calls-table")) root.classList.add("plain");
  // A wide picture begins where what it is about stands.
  for (const box of document.querySelectorAll(".around .scroll")) {
    const show = () => {
      const about = box.querySelector(".box.about");
      if (about) box.scrollLeft = about.getBoundingClientRect().x - box.getBoundingClientRect().x + box.scrollLeft - (box.clientWidth - 196) / 2;
    };
    show();
    box.closest("details.further")?.addEventListener("toggle", show);
  }
  show();

  const command = document.getElementById("next-command"), copy = document.getElementById("copy");
  const choose = () => window.getSelection().selectAllChildren(command);
  copy?.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    } catch { choose(); }
  });

  const tree = document.getElementById("tree");
  const inside = (fold) => fold.closest("li").querySelector(":scope > ul");
  const open = (fold, wanted) => { fold.setAttribute("aria-expanded", String(wanted)); inside(fold).hidden = !wanted; };
  const isOpen = (fold) => fold.getAttribute("aria-expanded") === "true";
  tree?.addEventListener("click", (event) => {
    const fold = event.target.closest(".fold");
    if (fold) open(fold, !isOpen(fold));
  });
  // Arrow keys as in a file tree, on the fold buttons: right opens, left closes or goes up, up and down move.
  tree?.addEventListener("keydown", (event) => {
    const fold = event.target.closest(".fold");
    if (!fold || event.altKey || event.ctrlKey || event.metaKey) return;
    const seen = [...tree.querySelectorAll(".fold")].filter((other) => other.offsetParent), at = seen.indexOf(fold);
    const up = fold.closest("ul").closest("li")?.querySelector(".fold");
    const moves = {
      ArrowRight: () => (isOpen(fold) ? seen[at + 1]?.focus() : open(fold, true)),
      ArrowLeft: () => (isOpen(fold) ? open(fold, false) : up?.focus()),
      ArrowDown: () => seen[at + 1]?.focus(),
      ArrowUp: () => seen[at - 1]?.focus(),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  });
})();
