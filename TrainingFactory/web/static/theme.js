// Runs before anything is painted, so that a dark page never flashes white.
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("theme");
    const system = dark.matches ? "dark" : "light";
    document.documentElement.dataset.theme = ["light", "dark"].includes(chosen) ? chosen : system;
    document.dispatchEvent(new Event("theme"));
  };
  dark.addEventListener("change", apply);
  document.addEventListener("choose-theme", apply);
  apply();
})();
