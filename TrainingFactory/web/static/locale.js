// Runs before uPlot, which formats numbers for navigator.language and throws where that is no language tag. Chromium
// reports en-US@posix under the POSIX locale.
(function () {
  try {
    new Intl.NumberFormat(navigator.language);
  } catch {
    Object.defineProperty(navigator, "language", { value: "en-US" });
  }
})();
