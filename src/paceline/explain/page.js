"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const NS = "http://www.w3.org/2000/svg";
  const last = data.captions.length - 1;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let now = 0, playing = false, timer = 0, running = [];

  const make = (parent, name, attributes = {}, text = null) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    parent.append(node);
    return node;
  };
  // Drawings are as wide as the stage, so that the text keeps its size; narrow stages have another layout.
  const room = () => Math.max(300, Math.min(1000, $("stage").clientWidth));
  const canvas = (width, height) =>
    make($("stage"), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": "caption", style: `min-width:${width > room() ? width : 0}px` });
  const key = (label, color) => {
    const span = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = color;
    span.append(mark, label);
    $("legend").append(span);
    return mark;
  };
  const size = (bytes) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (bytes < 1024 || unit === "GiB") return `${unit === "B" ? bytes : bytes.toFixed(1)} ${unit}`;
      bytes /= 1024;
    }
  };
  const hue = (rank, ranks) => `hsl(${Math.round((360 * rank) / ranks)} var(--sat) var(--lum))`;

  // Each kind has draw(frame), which draws a frame, and move(frame, ms), which animates to it from the previous frame and returns a promise.
  const kinds = {
    chunks() {
      const { ranks, segments, states, steps, elements } = data;
      const narrow = room() < 640, left = narrow ? 60 : 84, right = narrow ? 78 : 110, row = 44, pitch = Math.max(62, 88 - ranks);
      const width = Math.max(room(), left + right + 36 * segments.length);
      const inner = width - left - right, top = 34;
      const svg = canvas(width, top + ranks * pitch);
      const x = (element) => left + (inner * element) / Math.max(1, elements);
      const y = (rank) => top + rank * pitch;
      const has = (value, rank) => Math.floor(value / 2 ** rank) % 2 === 1;
      const whose = (value) => {
        const parts = [...Array(ranks).keys()].filter((rank) => has(value, rank));
        if (parts.length === ranks && ranks > 1) return "all";
        return parts.length <= 4 ? parts.join("+") : `${parts.length} of ${ranks}`;
      };
      const slivers = (parent, value, x0, y0, wide, high) => {
        const part = wide / ranks;
        for (let rank = 0; rank < ranks; rank++)
          if (has(value, rank)) make(parent, "rect", { x: x0 + rank * part, y: y0, width: part + 0.3, height: high, style: `fill:${hue(rank, ranks)}` });
      };
      const cell = (parent, at, value, y0) => {
        const [start, stop] = segments[at], wide = x(stop) - x(start) - 3;
        make(parent, "rect", { class: "cell", x: x(start), y: y0, width: wide, height: row, rx: 4 });
        slivers(parent, value, x(start), y0, wide, row);
        const label = whose(value);
        if (wide > 7 * label.length) make(parent, "text", { class: `mid${label === "all" ? " whole" : ""}`, x: x(start) + wide / 2, y: y0 + row / 2 }, label);
      };
      for (let rank = 0; rank < ranks; rank++) key(`from rank ${rank}`, hue(rank, ranks));
      segments.forEach(([start, stop]) => {
        const text = stop - start === 1 ? `${start}` : `${start}–${stop - 1}`;
        if (x(stop) - x(start) > 7 * text.length) make(svg, "text", { class: "soft mid", x: (x(start) + x(stop)) / 2, y: 14 }, text);
      });
      make(svg, "text", { class: "soft left", x: 0, y: 14 }, "elements");
      const layer = make(svg, "g"), flights = make(svg, "g");
      const totals = [Array(ranks).fill(0)];
      for (const step of steps) {
        const next = [...totals.at(-1)];
        for (const send of step.sends) next[send.from] += send.bytes;
        totals.push(next);
      }
      const board = (frame) => {
        layer.replaceChildren();
        for (let rank = 0; rank < ranks; rank++) {
          make(layer, "text", { class: "left", x: 0, y: y(rank) + row / 2 }, `rank ${rank}`);
          states[frame][rank].forEach((value, at) => cell(layer, at, value, y(rank)));
          make(layer, "text", { class: "soft left", x: width - right + 10, y: y(rank) + row / 2 }, `sent ${size(totals[frame][rank])}`);
        }
      };
      const draw = (frame) => {
        flights.replaceChildren();
        board(frame);
        if (frame === 0) return;
        for (const send of steps[frame - 1].sends) {
          const x0 = x(send.start), wide = x(send.stop) - x0 - 3, down = send.to > send.from;
          make(layer, "rect", { class: "fresh", x: x0, y: y(send.to), width: wide, height: row, rx: 4 });
          const far = Math.abs(send.to - send.from) > 1, middle = x0 + wide / 2 + (far ? Math.min(14, wide / 3) : 0);
          const from = y(send.from) + (down ? row : 0), to = y(send.to) + (down ? -5 : row + 5), bend = far ? Math.min(30, wide / 2) : 0;
          make(layer, "path", { class: "arrow", d: `M${middle} ${from}C${middle + bend} ${from} ${middle + bend} ${to} ${middle} ${to}` });
          const tip = down ? `M${middle - 4} ${to}h8l-4 5z` : `M${middle - 4} ${to}h8l-4 -5z`;
          make(layer, "path", { class: "head", d: tip });
        }
      };
      const move = (frame, ms) => {
        board(frame - 1);
        flights.replaceChildren();
        return Promise.all(steps[frame - 1].sends.map((send) => {
          const chip = make(flights, "g"), x0 = x(send.start), wide = x(send.stop) - x0 - 3;
          make(chip, "rect", { class: "chip", x: x0, y: y(send.from) + 6, width: wide, height: row - 12, rx: 5, style: "fill:var(--panel)" });
          segments.forEach(([start, stop], at) => {
            if (start >= send.start && stop <= send.stop) slivers(chip, states[frame - 1][send.from][at], x(start) + 1, y(send.from) + 7, x(stop) - x(start) - 5, row - 14);
          });
          const way = chip.animate([{ transform: "translateY(0)" }, { transform: `translateY(${y(send.to) - y(send.from)}px)` }], { duration: ms, easing: "ease-in-out", fill: "forwards" });
          running.push(way);
          return way.finished;
        }));
      };
      return { draw, move, ms: 900 };
    },

    timeline() {
      const { lanes, bars, times, end } = data;
      const buckets = data.buckets || [], fills = data.fills || [];
      const width = room(), narrow = width < 640, left = narrow ? 116 : 150, row = 30, top = 10, inner = width - left - 14, ticks = narrow ? 2 : 5;
      const foot = top + lanes.length * row, boxes = buckets.length ? 26 + data.ranks * 58 : 0;
      const svg = canvas(width, foot + 30 + boxes);
      const x = (time) => left + (inner * time) / end;
      lanes.forEach((lane, at) => {
        make(svg, "text", { class: "left", x: 0, y: top + at * row + row / 2 }, lane);
        make(svg, "line", { class: "axis", x1: left, x2: width - 14, y1: top + (at + 1) * row, y2: top + (at + 1) * row });
      });
      for (let tick = 0; tick <= ticks; tick++) make(svg, "text", { class: "soft mid", x: x((end * tick) / ticks) - (tick === ticks ? 14 : 0), y: foot + 14 }, `${((1000 * end * tick) / ticks).toFixed(1)} ms`);
      for (const [name, color] of Object.entries(data.colors)) key(name, color);
      const layer = make(svg, "g");
      const show = (time) => {
        layer.replaceChildren();
        for (const bar of bars) {
          if (bar.start > time) continue;
          const x0 = x(bar.start), wide = Math.max(1.5, x(Math.min(bar.end, time)) - x0), y0 = top + bar.lane * row + 4;
          const node = make(layer, "rect", { x: x0, y: y0, width: wide, height: row - 8, rx: 3, style: `fill:${data.colors[bar.kind]}` });
          make(node, "title", {}, `${bar.label}: ${(1000 * (bar.end - bar.start)).toFixed(2)} ms`);
          if (wide > 7 * bar.label.length) make(layer, "text", { class: "mid small", x: x0 + wide / 2, y: y0 + row / 2 - 4, style: "fill:var(--panel)" }, bar.label);
        }
        make(layer, "line", { class: "cursor", x1: x(time), x2: x(time), y1: 2, y2: foot });
        if (buckets.length) fillBoxes(time);
      };
      const fillBoxes = (time) => {
        const boxWidth = inner / buckets.length;
        for (let rank = 0; rank < data.ranks; rank++) {
          const y0 = foot + 40 + rank * 58;
          make(layer, "text", { class: "left", x: 0, y: y0 + 19 }, `rank ${rank}, buckets`);
          buckets.forEach((bytes, bucket) => {
            const full = fills.filter((fill) => fill.rank === rank && fill.bucket === bucket && fill.time <= time).reduce((sum, fill) => sum + fill.bytes, 0);
            const sum = bars.find((bar) => bar.rank === rank && bar.bucket === bucket && bar.kind === "all-reduce");
            const state = !sum || time < sum.start ? `${Math.round((100 * full) / bytes)} % filled` : time < sum.end ? "all-reduce running" : "summed";
            const x0 = left + bucket * boxWidth;
            make(layer, "rect", { class: "cell", x: x0, y: y0, width: boxWidth - 8, height: 38, rx: 5 });
            const color = state === "summed" ? data.colors["summed"] : state.startsWith("all") ? data.colors["all-reduce"] : data.colors["backward"];
            make(layer, "rect", { x: x0, y: y0, width: Math.max(0, ((boxWidth - 8) * full) / bytes), height: 38, rx: 5, style: `fill:${color};opacity:.45` });
            const short = state === "summed" ? "sum" : state.startsWith("all") ? "sent" : state.replace(" filled", "");
            if (boxWidth > 46) make(layer, "text", { class: "mid small", x: x0 + boxWidth / 2 - 4, y: y0 + 19 }, boxWidth > 180 ? `bucket ${bucket}: ${state}` : boxWidth > 120 ? state : short);
          });
        }
      };
      const move = (frame, ms) => new Promise((done) => {
        const from = times[frame - 1], begun = performance.now();
        const token = { cancel() { token.off = true; done(); }, off: false };
        running.push(token);
        const tick = (at) => {
          if (token.off) return;
          const share = Math.min(1, (at - begun) / ms);
          show(from + (times[frame] - from) * share);
          if (share < 1) requestAnimationFrame(tick); else done();
        };
        requestAnimationFrame(tick);
      });
      return { draw: (frame) => show(times[frame]), move, ms: 500 };
    },

    memory() {
      const { frames, kinds: names, ranks, max_bytes } = data;
      const width = room(), narrow = width < 640, left = narrow ? 54 : 84, row = narrow ? 40 : 26, gap = 26, pitch = names.length * row + gap;
      const inner = narrow ? width - left - 4 : width - left - 250, thick = narrow ? row - 19 : row - 5;
      const svg = canvas(width, ranks * pitch + 4);
      const x = (bytes) => (inner * bytes) / max_bytes;
      names.forEach((name) => key(name, data.colors[name]));
      key("predicted by the strategy before the run", "transparent").className = "dashed";
      const parts = [];
      for (let rank = 0; rank < ranks; rank++) {
        make(svg, "text", { class: "left", x: 0, y: 4 + rank * pitch + (names.length * row) / 2 }, `rank ${rank}`);
        parts.push(names.map((name, at) => {
          const y0 = 4 + rank * pitch + at * row;
          make(svg, "rect", { class: "cell", x: left, y: y0, width: inner, height: thick, rx: 3 });
          const bar = make(svg, "rect", { x: left, y: y0, width: 0, height: thick, rx: 3, style: `fill:${data.colors[name]}` });
          const mark = make(svg, "rect", { class: "declared", x: left, y: y0 - 1, width: 0, height: thick + 2, rx: 3 });
          const label = make(svg, "text", { class: "left small", x: narrow ? left : left + inner + 12, y: y0 + (narrow ? thick + 9 : row / 2 - 2) });
          return { bar, mark, label };
        }));
      }
      const show = (frame, share, before) => {
        for (let rank = 0; rank < ranks; rank++) names.forEach((name, at) => {
          const value = (of) => frames[of].ranks[rank][name];
          const { bar, mark, label } = parts[rank][at];
          bar.setAttribute("width", x(value(before) + (value(frame) - value(before)) * share));
          mark.setAttribute("width", x(frames[frame].declared[name]));
          label.textContent = `${name} ${size(value(frame))} (declared ${size(frames[frame].declared[name])})`;
        });
      };
      const move = (frame, ms) => new Promise((done) => {
        const begun = performance.now();
        const token = { cancel() { token.off = true; done(); }, off: false };
        running.push(token);
        const tick = (at) => {
          if (token.off) return;
          const share = Math.min(1, (at - begun) / ms);
          show(frame, share, frame - 1);
          if (share < 1) requestAnimationFrame(tick); else done();
        };
        requestAnimationFrame(tick);
      });
      return { draw: (frame) => show(frame, 1, frame), move, ms: 900 };
    },
  };

  $("player").hidden = false;
  $("as-text").open = false;
  let picture = kinds[data.kind](), drawn = room();

  const settle = () => {
    clearTimeout(timer);
    running.splice(0).forEach((animation) => animation.cancel());
  };
  const controls = () => {
    $("caption").textContent = data.captions[now];
    $("seek").value = now;
    $("place").textContent = `${now} of ${last}`;
    $("play").textContent = playing ? "‖ Pause" : "▶ Play";
    $("first").disabled = $("back").disabled = now === 0;
    $("next").disabled = now === last;
    history.replaceState(null, "", `#step=${now}`);
  };
  const go = async (frame, moving) => {
    settle();
    const target = Math.max(0, Math.min(last, frame));
    const animate = moving && target === now + 1 && !calm.matches;
    now = target;
    controls();
    if (animate) {
      try { await picture.move(target, picture.ms / Number($("speed").value)); } catch { return; }
      if (now !== target) return;
    }
    picture.draw(now);
    if (playing && now < last) timer = setTimeout(() => go(now + 1, true), 600 / Number($("speed").value));
    else if (playing) pause();
  };
  const pause = () => { playing = false; controls(); };
  const toggle = () => {
    playing = !playing;
    if (playing) go(now === last ? 0 : now + 1, true);
    else { clearTimeout(timer); controls(); }
  };
  const step = (frame, moving) => { playing = false; go(frame, moving); };
  $("first").onclick = () => step(0, false);
  $("back").onclick = () => step(now - 1, false);
  $("next").onclick = () => step(now + 1, true);
  $("play").onclick = toggle;
  $("seek").oninput = () => step(Number($("seek").value), false);
  const fromAddress = () => {
    const found = /step=(\d+)/.exec(location.hash);
    return found ? Number(found[1]) : 0;
  };
  addEventListener("resize", () => {
    if (room() === drawn) return;
    drawn = room();
    $("stage").replaceChildren();
    $("legend").replaceChildren();
    picture = kinds[data.kind]();
    go(now, false);
  });
  addEventListener("hashchange", () => { if (fromAddress() !== now) step(fromAddress(), false); });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const jump = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
    if (jump !== undefined) { event.preventDefault(); step(jump, event.key === "ArrowRight"); }
    else if (event.key === " " && event.target.tagName !== "BUTTON" && event.target.tagName !== "SUMMARY") { event.preventDefault(); toggle(); }
  });
  go(fromAddress(), false);
})();
