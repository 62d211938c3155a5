"use strict";
const root = document.documentElement;
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}
function label() {
  button.textContent = isDark() ? "Light theme" : "Dark theme";
}
button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  label();
});
system.addEventListener("change", label);
label();
button.hidden = false;

for (const copy of document.querySelectorAll(".copy")) {
  const code = copy.parentElement.querySelector("code");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
  copy.hidden = false;
}
