// The timeline of a report: lanes on a canvas, with zoom, pan, hover and search. No dependencies.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const step = new Uint32Array(bytes(data.step));
  const op = new Uint32Array(bytes(data.op));
  const start = new Float64Array(bytes(data.start));
  const end = new Float64Array(bytes(data.end));
  const waited = new Float32Array(bytes(data.waited));
  const canvas = document.getElementById("timeline");
  const context = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const search = document.getElementById("search");
  const found = document.getElementById("found");
  const LEFT = 158, RULER = 22, HEIGHT = 15, COMPUTE = 26, STRIP = 7, GAP = 10;

  let low = 0, high = 0;
  for (let i = 0; i < end.length; i++) high = Math.max(high, end[i]);
  const whole = [low, high];
  let view = data.home.slice();
  let shown = []; // what the ruler says
  let matches = null, current = -1, chosen = -1, hovered = -1;

  // Where each row is, and the idle intervals of each rank.
  const tops = [], heights = [];
  let bottom = RULER;
  data.rows.forEach((row, r) => {
    if (r && row.rank !== data.rows[r - 1].rank) bottom += GAP;
    tops.push(bottom);
    heights.push(row.lane === "compute" ? COMPUTE : HEIGHT);
    bottom += heights[r] + (row.lane === "compute" ? STRIP + 2 : 2);
  });
  const idle = data.rows.map((row) => row.lane === "compute" ? data.idle.filter((p) => p[0] === row.rank) : []);
  // A maximum of all ends so far: the first op that may reach into a view is found by bisection.
  const reach = new Float64Array(end.length);
  for (let r = 0; r < data.rows.length; r++) {
    let most = -Infinity;
    for (let i = data.first[r]; i < data.first[r + 1]; i++) reach[i] = most = Math.max(most, end[i]);
  }

  function bisect(array, from, to, value) {
    while (from < to) {
      const middle = (from + to) >> 1;
      if (array[middle] < value) from = middle + 1; else to = middle;
    }
    return from;
  }
  const width = () => canvas.clientWidth - LEFT;
  const x = (time) => LEFT + (time - view[0]) / (view[1] - view[0]) * width();
  const timeAt = (pixel) => view[0] + (pixel - LEFT) / width() * (view[1] - view[0]);

  const unitOf = (size) => size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  function words(seconds) {
    const [unit, name] = unitOf(Math.abs(seconds));
    return (seconds / unit).toPrecision(name === "µs" ? 3 : 4) + " " + name;
  }

  function draw() {
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = bottom + 6 + "px";
    const w = canvas.clientWidth, h = bottom + 6;
    if (canvas.width !== Math.round(w * scale) || canvas.height !== Math.round(h * scale)) {
      canvas.width = Math.round(w * scale);
      canvas.height = Math.round(h * scale);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, w, h);
    context.font = "11px system-ui, sans-serif";
    ruler(w, h);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, w - LEFT, h);
    context.clip();
    data.rows.forEach((row, r) => lane(r, w));
    if (chosen >= 0) arrows(chosen);
    context.restore();
    labels(w);
  }

  function ruler(w, h) {
    shown = [];
    const span = view[1] - view[0];
    const rough = span / Math.max(2, width() / 110);
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const tick = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
    const [unit, name] = unitOf(Math.max(Math.abs(view[0] - data.home[0]), Math.abs(view[1] - data.home[0])));
    const decimals = Math.max(0, -Math.floor(Math.log10(tick / unit) + 1e-9)); // so that no two ticks read the same
    context.textBaseline = "middle";
    for (let t = Math.ceil((view[0] - data.home[0]) / tick) * tick; t <= view[1] - data.home[0]; t += tick) {
      const at = x(t + data.home[0]);
      context.fillStyle = "#e6e6e6";
      context.fillRect(Math.round(at), RULER - 4, 1, h);
      context.fillStyle = "#444";
      const last = at > w - 28;
      context.textAlign = last ? "right" : "center";
      const text = Math.abs(t) < tick / 1e6 ? "0" : (t / unit).toFixed(decimals) + " " + name;
      context.fillText(text, last ? w - 2 : at, 9);
      shown.push(text);
    }
  }

  function labels(w) {
    context.fillStyle = "#fff";
    context.fillRect(0, RULER, LEFT - 2, bottom);
    context.textAlign = "right";
    data.rows.forEach((row, r) => {
      const compute = row.lane === "compute";
      if (compute && r) {
        context.fillStyle = "#ccc";
        context.fillRect(0, tops[r] - GAP / 2 - 1, w, 1);
      }
      context.fillStyle = "#222";
      context.font = (compute ? "bold " : "") + "11px system-ui, sans-serif";
      context.fillText(compute ? "rank " + row.rank + "  compute" : row.lane, LEFT - 8, tops[r] + heights[r] / 2);
    });
  }

  // Pieces too short to be told apart: each pixel shows the colour that it is filled with for the longest.
  const filled = [];
  function fill(begin, finish, perPixel, colour) {
    const from = Math.max((begin - view[0]) / perPixel, 0), to = Math.min((finish - view[0]) / perPixel, width());
    for (let p = Math.floor(from); p <= to; p++) {
      const share = Math.max(Math.min(to, p + 1) - Math.max(from, p), p === Math.floor(from) ? 1e-9 : 0);
      if (!share) continue;
      const pixel = filled[p] || (filled[p] = new Map());
      pixel.set(colour, (pixel.get(colour) || 0) + share);
    }
  }
  // Paints what was filled and forgets it; `proportional`: as high as the pixel is filled.
  function paint(top, height, proportional) {
    const look = (pixel) => {
      let longest = null, sum = 0;
      for (const [colour, share] of pixel) {
        sum += share;
        if (longest === null || share > pixel.get(longest)) longest = colour;
      }
      return [longest, proportional ? Math.max(1, Math.round(height * Math.min(sum, 1))) : height];
    };
    let run = null; // pixels that look the same are one box: [left, right, colour, height]
    filled.forEach((pixel, p) => {
      const [colour, high] = look(pixel);
      if (run && run[1] === p && run[2] === colour && run[3] === high) run[1] = p + 1;
      else { box(run, top); run = [p, p + 1, colour, high]; }
    });
    box(run, top);
    filled.length = 0;
  }
  function box(run, top) {
    if (!run) return;
    context.fillStyle = run[2];
    context.fillRect(LEFT + run[0], top, run[1] - run[0], run[3]);
  }

  function lane(r, w) {
    const to = data.first[r + 1], top = tops[r], height = heights[r], perPixel = (view[1] - view[0]) / width();
    const colourOf = (i) => data.groups[data.group[op[i]]].colour;
    const alone = []; // ops that are drawn one by one
    for (let i = bisect(reach, data.first[r], to, view[0]); i < to && start[i] <= view[1]; i++) {
      if (end[i] < view[0]) continue;
      if ((end[i] - start[i]) / perPixel > 4 || matches || i === chosen || i === hovered) alone.push(i);
      else fill(start[i], end[i], perPixel, colourOf(i));
    }
    paint(top, height, false);
    for (const i of alone) {
      const from = x(start[i]), wide = Math.max((end[i] - start[i]) / perPixel, 1), colour = colourOf(i);
      context.globalAlpha = matches && !matches.has(i) ? 0.15 : 1;
      context.fillStyle = colour;
      const narrow = wide > 4 ? 0.6 : 0;
      context.fillRect(from, top, wide - narrow, height);
      if (i === chosen || i === hovered) {
        context.strokeStyle = "#000";
        context.lineWidth = 1.5;
        context.strokeRect(from, top, wide, height);
      }
      if (wide > 34) write(i, Math.max(from, LEFT), Math.min(from + wide, w), top + height / 2, colour);
    }
    context.globalAlpha = 1;
    for (const [, begin, finish, cause] of idle[r]) {
      if (finish >= view[0] && begin <= view[1]) fill(begin, finish, perPixel, data.causes[cause].colour);
    }
    paint(top + height + 1, STRIP, true);
  }

  function write(i, from, to, middle, colour) {
    const parts = data.names[op[i]].split(" ");
    const long = parts.slice(1).join(" "), room = to - from - 6;
    const text = context.measureText(data.names[op[i]]).width < room ? data.names[op[i]] : long;
    if (context.measureText(text).width > room) return;
    const [red, green, blue] = [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
    context.fillStyle = 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
    context.textAlign = "center";
    context.fillText(text, (from + to) / 2, middle + 0.5);
  }

  // The op of the same step that `number` names, in the arrays; -1 if it is not shown.
  function find(number, inStep) {
    const r = data.row[number];
    for (let i = data.first[r]; i < data.first[r + 1]; i++) if (op[i] === number && step[i] === inStep) return i;
    return -1;
  }
  function waitedFor(i) {
    let best = -1;
    for (const d of data.after[op[i]]) {
      const j = find(d, step[i]);
      if (j >= 0 && (best < 0 || end[j] > end[best])) best = j;
    }
    return best;
  }
  function arrows(i) {
    context.strokeStyle = "#000";
    context.lineWidth = 1;
    for (const d of data.after[op[i]]) {
      const j = find(d, step[i]);
      if (j < 0) continue;
      context.beginPath();
      context.moveTo(x(end[j]), tops[data.row[d]] + heights[data.row[d]] / 2);
      context.lineTo(x(start[i]), tops[data.row[op[i]]] + heights[data.row[op[i]]] / 2);
      context.stroke();
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const px = event.clientX - box.left, py = event.clientY - box.top;
    const r = tops.findIndex((top, k) => py >= top && py < top + heights[k] + (idle[k].length ? STRIP + 2 : 0));
    if (r < 0 || px < LEFT) return { px, py, r: -1, i: -1 };
    const time = timeAt(px), near = 2 * (view[1] - view[0]) / width();
    if (py >= tops[r] + heights[r]) {
      return { px, py, r, i: -1, idle: idle[r].find((p) => p[1] <= time && time <= p[2]) };
    }
    let best = -1;
    for (let i = bisect(reach, data.first[r], data.first[r + 1], time - near);
      i < data.first[r + 1] && start[i] <= time + near; i++) {
      if (end[i] >= time - near && (best < 0 || distance(i, time) <= distance(best, time))) best = i;
    }
    return { px, py, r, i: best };
  }
  const distance = (i, time) => Math.max(start[i] - time, time - end[i], 0);

  function show(place) {
    const lines = [];
    if (place.i >= 0) {
      const i = place.i, row = data.rows[data.row[op[i]]], before = waitedFor(i);
      const note = data.notes[step[i] + "," + op[i]];
      lines.push(data.names[op[i]] + (note ? " (" + note + ")" : ""));
      lines.push("step " + step[i] + ", rank " + row.rank + ", " + row.lane);
      lines.push("from " + words(start[i] - data.home[0]) + ", takes " + words(end[i] - start[i]));
      if (waited[i] > 0) lines.push("was ready " + words(waited[i]) + " before its lane began it");
      if (before >= 0) lines.push("last thing it needed: " + data.names[op[before]] + " of rank " + data.rows[data.row[op[before]]].rank);
    } else if (place.idle) {
      lines.push("idle: " + data.causes[place.idle[3]].name, words(place.idle[2] - place.idle[1]));
    }
    tip.hidden = !lines.length;
    tip.textContent = lines.join("\n");
    const room = canvas.clientWidth;
    tip.style.left = Math.min(place.px + 14, room - 300) + "px";
    tip.style.top = place.py + 16 + "px";
  }

  function look(from, to) {
    const span = Math.max(to - from, 1e-7), most = 1.1 * (whole[1] - whole[0]);
    const middle = Math.min(Math.max((from + to) / 2, whole[0]), whole[1]);
    const half = Math.min(span, most) / 2;
    view = [middle - half, middle + half];
    schedule();
  }
  function zoom(factor, time) {
    look(time - (time - view[0]) * factor, time + (view[1] - time) * factor);
  }
  let waiting = false;
  function schedule() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  canvas.addEventListener("wheel", (event) => {
    const span = view[1] - view[0];
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), timeAt(event.offsetX));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      const by = (event.deltaX || event.deltaY) / width() * span;
      look(view[0] + by, view[1] + by);
    }
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, view: view.slice(), moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = (drag.x - event.clientX) / width() * (drag.view[1] - drag.view[0]);
      drag.moved = drag.moved || Math.abs(event.clientX - drag.x) > 3;
      if (drag.moved) { tip.hidden = true; look(drag.view[0] + by, drag.view[1] + by); }
      return;
    }
    const place = at(event);
    show(place);
    if (place.i !== hovered) { hovered = place.i; schedule(); }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) { chosen = at(event).i; schedule(); }
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; hovered = -1; schedule(); });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event.offsetX)));
  canvas.addEventListener("keydown", (event) => {
    const span = view[1] - view[0], middle = (view[0] + view[1]) / 2;
    const act = {
      "+": () => zoom(0.6, middle), "=": () => zoom(0.6, middle), "-": () => zoom(1.6, middle),
      ArrowLeft: () => look(view[0] - span / 5, view[1] - span / 5),
      ArrowRight: () => look(view[0] + span / 5, view[1] + span / 5),
      "0": () => look(data.home[0], data.home[1]),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const press = (id, act) => document.getElementById(id).addEventListener("click", act);
  press("in", () => zoom(0.6, (view[0] + view[1]) / 2));
  press("out", () => zoom(1.6, (view[0] + view[1]) / 2));
  press("home", () => look(data.home[0], data.home[1]));
  press("all", () => look(whole[0], whole[1]));

  // Search: words that all have to be in the op's text or its lane; Enter goes to the next match.
  function searchNow() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!wanted.length) {
      matches = null; found.textContent = "";
    } else {
      const texts = data.names.map((name, number) => {
        const row = data.rows[data.row[number]];
        return (name + " rank " + row.rank + " " + row.lane).toLowerCase();
      });
      const hit = texts.map((text) => wanted.every((word) => text.includes(word)));
      matches = new Set();
      for (let i = 0; i < op.length; i++) if (hit[op[i]]) matches.add(i);
      found.textContent = matches.size + " found";
    }
    current = -1;
    schedule();
  }
  search.addEventListener("input", searchNow);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !matches || !matches.size) return;
    const list = Array.from(matches).sort((a, b) => start[a] - start[b]);
    current = (current + (event.shiftKey ? list.length - 1 : 1)) % list.length;
    chosen = list[current];
    found.textContent = (current + 1) + " of " + list.length;
    const span = Math.min(view[1] - view[0], Math.max(20 * (end[chosen] - start[chosen]), 1e-6));
    const middle = (start[chosen] + end[chosen]) / 2;
    look(middle - span / 2, middle + span / 2);
  });
  window.addEventListener("resize", schedule);
  draw();
  // For tests, and for the curious in the console.
  window.spipeTimeline = {
    ops: op.length, view: () => view.slice(), chosen: () => chosen, find, x, tops, heights, look,
    ruler: () => shown,
    place: (i) => [x((start[i] + end[i]) / 2), tops[data.row[op[i]]] + heights[data.row[op[i]]] / 2],
    draw: () => { const begin = performance.now(); draw(); return performance.now() - begin; },
  };
})();
