// Renders the equations of a page: pymdownx.arithmatex marks them with the class "arithmatex".
document.addEventListener("DOMContentLoaded", () => {
  for (const equation of document.querySelectorAll(".arithmatex")) {
    renderMathInElement(equation, {
      delimiters: [
        { left: "\\[", right: "\\]", display: true },
        { left: "\\(", right: "\\)", display: false },
      ],
      throwOnError: true,
    });
  }
});
