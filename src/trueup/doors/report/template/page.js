"use strict";
// The look (light, dark, print), the copy button and the tree. `repaint` listeners repaint what CSS cannot reach.
window.trueup = { repaint: [] };
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
