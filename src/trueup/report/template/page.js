"use strict";
// The look (light, dark, print) and the copy button. `look` listeners repaint what CSS cannot reach.
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
})();
