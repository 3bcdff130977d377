// Scroll the sidebar, which is longer than the window, to the current page.
document.addEventListener("DOMContentLoaded", () => {
  const scroll = document.querySelector(".sidebar-scroll");
  const page = document.querySelector(".sidebar-tree .current-page > .reference");
  if (!scroll || !page) return;
  const distance = page.getBoundingClientRect().top - scroll.getBoundingClientRect().top;
  if (distance > scroll.clientHeight - 2 * page.offsetHeight) scroll.scrollTop += distance - scroll.clientHeight / 2;
});
