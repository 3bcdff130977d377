"use strict";
(() => {
  const chinese = document.documentElement.lang === "zh-CN";
  const data = JSON.parse(document.getElementById("data").textContent)[chinese ? "zh" : "en"];
  const words = chinese ? { of: "/", play: "▶ 播放", pause: "‖ 暂停" } : { of: "of", play: "▶ Play", pause: "‖ Pause" };
  const $ = (id) => document.getElementById(id);
  const stage = $("stage"), last = data.captions.length - 1;
  const calm = matchMedia("(prefers-reduced-motion: reduce)"), narrow = matchMedia("(max-width: 640px)");
  let now = 0, playing = false, timer = 0;

  const speed = () => Number($("speed").value);
  // The drawing of a frame has hidden chips that the class `moves` lets travel to their targets.
  const show = (moves) => {
    stage.innerHTML = (narrow.matches ? data.narrow : data.wide)[now];
    stage.classList.toggle("moves", moves && !calm.matches);
    stage.style.setProperty("--move", `${900 / speed()}ms`);
    $("caption").textContent = data.captions[now];
    $("seek").value = now;
    $("place").textContent = `${now} ${words.of} ${last}`;
    $("play").textContent = playing ? words.pause : words.play;
    $("first").disabled = $("back").disabled = now === 0;
    $("next").disabled = now === last;
    if (location.protocol !== "about:") history.replaceState(null, "", `#step=${now}`);
  };
  const go = (frame, moves) => {
    clearTimeout(timer);
    now = Math.max(0, Math.min(last, frame));
    if (now === last) playing = false;
    show(moves);
    if (playing) timer = setTimeout(() => go(now + 1, true), 1600 / speed());
  };
  const step = (frame, moves = false) => { playing = false; go(frame, moves); };
  const toggle = () => {
    playing = !playing;
    if (playing) go(now === last ? 0 : now + 1, true);
    else { clearTimeout(timer); show(false); }
  };
  const fromAddress = () => Number(/step=(\d+)/.exec(location.hash)?.[1] ?? 0);

  $("first").onclick = () => step(0);
  $("back").onclick = () => step(now - 1);
  $("next").onclick = () => step(now + 1, true);
  $("play").onclick = toggle;
  $("seek").oninput = () => step(Number($("seek").value));
  narrow.addEventListener("change", () => show(false));
  addEventListener("hashchange", () => { if (fromAddress() !== now) step(fromAddress()); });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const target = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
    if (target !== undefined) { event.preventDefault(); step(target, event.key === "ArrowRight"); }
    else if (event.key === " " && !["BUTTON", "SUMMARY"].includes(event.target.tagName)) { event.preventDefault(); toggle(); }
  });
  $("player").hidden = false;
  $("as-text").open = false;
  go(fromAddress(), false);
})();
