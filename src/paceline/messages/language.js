// Show a page in Chinese if the panel asks for it, or, without the panel, if the browser does.
(() => {
  let stored = null;
  try {
    stored = localStorage.getItem("paceline-language");
  } catch {
    // In the panel, a page is in a sandbox without storage; the panel names the language.
  }
  const asked = new URLSearchParams(location.search).get("language");
  if (!(asked ?? stored ?? navigator.language ?? "").startsWith("zh")) return;
  document.documentElement.lang = "zh-CN";
  for (const element of document.querySelectorAll("[data-zh]"))
    element.textContent = element.dataset.zh;
  for (const name of ["aria-label", "data-label", "title"])
    for (const element of document.querySelectorAll(`[data-zh-${name}]`))
      element.setAttribute(name, element.getAttribute(`data-zh-${name}`));
})();
