// The heat map of a monitored run. Each cell has a number between -1 and 1; of the cells that share a pixel the most extreme is drawn,
// into an image that is made anew only when the view changes.
"use strict";
(() => {
  const place = (id) => document.getElementById(id);
  const data = JSON.parse(place("trend-data").textContent);
  const heat = place("heat"), line = place("line"), under = place("under");
  const BROKEN = 9, LABEL = 190, AXIS = 22, LEAST = 2;
  let map = null, rows = [], tones = null, image = null, from = 0, to = 0, chosen = null, at = null, start = null;

  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (value, digits = 5) => Number.isNaN(value) ? "nothing taken" : !Number.isFinite(value) ? "NaN or Inf"
    : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? value.toExponential(digits - 2) : String(+value.toPrecision(digits));

  async function unpacked(packed, count) {
    const bytes = Uint8Array.from(atob(packed), (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const joined = new Uint8Array(4 * count);
    for (let k = 0; k < count; k++) for (let b = 0; b < 4; b++) joined[4 * k + b] = planes[b * count + k];
    return new Float32Array(joined.buffer);
  }

  async function loaded(one) {
    if (!one.ready) {
      const count = one.rows.length * one.steps.length;
      one.lows = await unpacked(one.low, count);
      one.highs = one.high === null ? one.lows : await unpacked(one.high, count);
      one.ready = true;
    }
    return one;
  }

  const scaled = (value) => map.log ? Math.log10(Math.max(value, 1e-38)) : value;

  function median(values) {
    const held = Float64Array.from(values).sort();
    return held.length ? held[held.length >> 1] : NaN;
  }

  // One number a cell between -1 and 1: beside the row's own middle, or of all rows' range.
  function coloured() {
    const columns = map.steps.length, own = place("colour").value === "own";
    tones = new Float32Array(rows.length * columns).fill(NaN);
    let least = Infinity, most = -Infinity;
    if (!own) for (const row of rows) for (let k = 0; k < columns; k++) {
      const value = scaled(map.highs[row * columns + k]);
      if (Number.isFinite(value)) { least = Math.min(least, value); most = Math.max(most, value); }
    }
    rows.forEach((row, y) => {
      let middle = 0, spread = 1;
      if (own) {
        const every = [];
        const stride = Math.max(1, Math.floor(columns / 400));
        for (let k = 0; k < columns; k += stride) { const v = scaled(map.highs[row * columns + k]); if (Number.isFinite(v)) every.push(v); }
        middle = median(every);
        spread = Math.max(1.4826 * median(every.map((v) => Math.abs(v - middle))), map.log ? 0.01 : 1e-3 * Math.abs(middle), 1e-12);
      }
      for (let k = 0; k < columns; k++) {
        const high = map.highs[row * columns + k], low = map.lows[row * columns + k], p = y * columns + k;
        if (Number.isNaN(high)) continue;
        if (!Number.isFinite(high) || !Number.isFinite(low)) { tones[p] = BROKEN; continue; }
        let t;
        if (own) {
          const up = (scaled(high) - middle) / spread, down = (scaled(low) - middle) / spread;
          t = Math.max(-1, Math.min(1, (Math.abs(up) > Math.abs(down) ? up : down) / 8));
        } else t = most > least ? 2 * (scaled(high) - least) / (most - least) - 1 : 0;
        tones[p] = t;
      }
    });
  }

  function painted(most) {
    const columns = map.steps.length, wide = Math.max(1, Math.min(to - from, Math.floor(most)));
    const pixels = new ImageData(wide, Math.max(1, rows.length));
    for (let y = 0; y < rows.length; y++) for (let x = 0; x < wide; x++) {
      const end = from + Math.max(Math.floor((x + 1) * (to - from) / wide), Math.floor(x * (to - from) / wide) + 1);
      let found = NaN;
      for (let k = from + Math.floor(x * (to - from) / wide); k < end; k++) {
        const t = tones[y * columns + k];
        if (!(Math.abs(t) <= Math.abs(found))) found = Number.isNaN(t) ? found : t;
      }
      if (Number.isNaN(found)) continue;
      const p = 4 * (y * wide + x), colour = found === BROKEN ? [200, 0, 200] : tint(found);
      pixels.data[p] = colour[0]; pixels.data[p + 1] = colour[1]; pixels.data[p + 2] = colour[2]; pixels.data[p + 3] = 255;
    }
    const canvas = document.createElement("canvas");
    canvas.width = wide; canvas.height = pixels.height;
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }

  // Blue below, grey in the middle, red above: told apart without red and green.
  const tint = (t) => {
    const ends = t < 0 ? [33, 102, 172] : [178, 24, 43], middle = [236, 236, 236], s = Math.min(1, Math.abs(t));
    return middle.map((one, k) => Math.round(one + (ends[k] - one) * s));
  };

  function sized(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [pen, width];
  }

  const label = () => heat.clientWidth < 560 ? 96 : LABEL;
  const tall = () => Math.max(LEAST, Math.min(22, Math.floor(520 / Math.max(1, rows.length))));
  const name = (row) => { const [scope, rank] = map.rows[row]; return (scope || map.kind) + (place("rank").options.length > 2 ? `, rank ${rank}` : ""); };

  // How many characters of whole parts all modules begin with.
  function beginning() {
    const scopes = rows.map((row) => map.rows[row][0]).filter(Boolean), first = scopes[0] || "";
    let shared = first.length;
    for (const one of scopes) while (!one.startsWith(first.slice(0, shared))) shared--;
    return first.lastIndexOf(".", shared - 1) + 1;
  }

  function draw() {
    const cell = tall(), [pen, width] = sized(heat, cell * rows.length + AXIS), left = label();
    pen.imageSmoothingEnabled = false;
    pen.clearRect(0, 0, width, heat.height);
    const view = [map.kind, from, to, rows.length, width, place("rank").value, place("colour").value].join();
    if (image === null || image.view !== view) { image = painted((width - left) * (window.devicePixelRatio || 1)); image.view = view; }
    pen.drawImage(image, left, 0, width - left, cell * rows.length);
    pen.fillStyle = ink("--ink"); pen.font = `${Math.min(12, Math.max(9, cell))}px system-ui`; pen.textBaseline = "middle";
    // Where rows are lower than text, the first rank of a module speaks for all; what all modules begin with is left out if need be.
    const every = Math.max(1, Math.ceil(10 / cell)), common = beginning();
    let free = 0;
    rows.forEach((row, y) => {
      const scope = map.rows[row][0];
      if (y < free || (every > 1 && y && map.rows[rows[y - 1]][0] === scope)) return;
      free = y + every;
      let said = every > 1 ? scope || map.kind : name(row);
      if (common && pen.measureText(said).width > left - 8) said = said.slice(common);
      while (said.length > 4 && pen.measureText(said).width > left - 8) said = "…" + said.slice(2);
      pen.fillText(said, 0, Math.max(5, y * cell + cell / 2));
    });
    pen.fillStyle = ink("--quiet"); pen.textBaseline = "bottom"; pen.font = "12px system-ui";
    const below = cell * rows.length + AXIS;
    pen.textAlign = "left"; pen.fillText(`step ${map.steps[from] ?? 0}`, left, below);
    pen.textAlign = "right"; pen.fillText(`${map.steps[to - 1] ?? 0}`, width, below);
    pen.textAlign = "left";
    const mark = ink("--bad");
    for (const alert of data.alerts) {
      const k = column(alert.step);
      if (k < from || k >= to) continue;
      const x = left + (k - from + 0.5) / (to - from) * (width - left);
      pen.fillStyle = mark; pen.beginPath(); pen.moveTo(x, below - 20); pen.lineTo(x - 4, below - 13); pen.lineTo(x + 4, below - 13); pen.fill();
    }
    if (at !== null) {
      pen.strokeStyle = ink("--focus"); pen.lineWidth = 1.5;
      const wide = (width - left) / (to - from);
      pen.strokeRect(left + (at[1] - from) * wide - 1, at[0] * cell, Math.max(3, wide) + 1, cell);
    }
  }

  function column(step) {
    let low = 0, high = map.steps.length;
    while (low < high) { const middle = (low + high) >> 1; if (map.steps[middle] <= step) low = middle + 1; else high = middle; }
    return low - 1;
  }

  function said(row, k) {
    const p = row * map.steps.length + k, last = k + 1 < map.steps.length ? map.steps[k + 1] - 1 : data.last;
    const low = map.lows[p], high = map.highs[p], span = last > map.steps[k] ? `steps ${map.steps[k]} to ${last}` : `step ${map.steps[k]}`;
    return `${map.kind}, ${name(row)}, ${span}: ` + (low === high || Number.isNaN(high) ? text(high) : `${text(low)} to ${text(high)}`);
  }

  function drawLine() {
    const [pen, width] = sized(line, 220), columns = map.steps.length;
    pen.clearRect(0, 0, width, 220);
    if (chosen === null) return;
    place("line-title").textContent = name(chosen) === map.kind ? map.kind : `${map.kind}, ${name(chosen)}`;
    let least = Infinity, most = -Infinity;
    for (let k = from; k < to; k++) for (const held of [map.lows, map.highs]) {
      const value = scaled(held[chosen * columns + k]);
      if (Number.isFinite(value)) { least = Math.min(least, value); most = Math.max(most, value); }
    }
    if (!(most >= least)) return;
    const pad = Math.max((most - least) * 0.05, 1e-9), left = 80;
    const x = (k) => left + (k - from + 0.5) / Math.max(1, to - from) * (width - left - 8);
    const y = (v) => 8 + (most + pad - v) / (most - least + 2 * pad) * 186;
    const ticks = [least, (least + most) / 2, most], back = (v, digits) => text(map.log ? 10 ** v : v, digits);
    const digits = [5, 6, 7].find((many) => new Set(ticks.map((v) => back(v, many))).size === ticks.length) ?? 7;  // float32 has 7
    pen.fillStyle = ink("--quiet"); pen.font = "12px system-ui"; pen.textAlign = "right";
    for (const v of ticks) { pen.fillText(back(v, digits), left - 8, y(v) + 4); pen.strokeStyle = ink("--line"); pen.beginPath(); pen.moveTo(left, y(v)); pen.lineTo(width, y(v)); pen.stroke(); }
    pen.fillText(`step ${map.steps[to - 1]}`, width, 216); pen.textAlign = "left"; pen.fillText(String(map.steps[from]), left, 216);
    pen.strokeStyle = ink("--baseline"); pen.lineWidth = 1.4; pen.beginPath();
    let pen_down = false;
    for (let k = from; k < to; k++) {
      const high = scaled(map.highs[chosen * columns + k]), low = scaled(map.lows[chosen * columns + k]);
      if (!Number.isFinite(high) || !Number.isFinite(low)) { pen_down = pen_down && Number.isNaN(high); continue; }
      if (pen_down) pen.lineTo(x(k), y(high)); else pen.moveTo(x(k), y(high));
      if (low !== high) pen.lineTo(x(k), y(low));
      pen_down = true;
    }
    pen.stroke();
  }

  const cellAt = (event) => {
    const box = heat.getBoundingClientRect(), left = label();
    const y = Math.floor((event.clientY - box.top) / tall()), k = from + Math.floor((event.clientX - box.left - left) / (box.width - left) * (to - from));
    return y >= 0 && y < rows.length && k >= from && k < to ? [y, k] : null;
  };

  function show(cell) { at = cell; if (cell !== null) under.textContent = said(rows[cell[0]], cell[1]); draw(); }
  function zoom(first, last) { from = Math.max(0, Math.min(first, last)); to = Math.min(map.steps.length, Math.max(first, last) + 1); at = null; draw(); drawLine(); }
  function choose(cell) { if (cell !== null) { chosen = rows[cell[0]]; drawLine(); } }

  heat.addEventListener("pointermove", (event) => { const cell = cellAt(event); if (cell && (!at || cell[0] !== at[0] || cell[1] !== at[1])) show(cell); });
  heat.addEventListener("pointerdown", (event) => { start = cellAt(event); });
  heat.addEventListener("pointerup", (event) => {
    const end = cellAt(event);
    if (start && end && Math.abs(start[1] - end[1]) > 2) zoom(start[1], end[1]); else { show(end); choose(end); }
    start = null;
  });
  heat.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }, move = moves[event.key];
    if (event.key === "Enter" && at) choose(at);
    if (!move) return;
    event.preventDefault();
    const [y, k] = at ?? [0, from];
    show([Math.max(0, Math.min(rows.length - 1, y + move[0])), Math.max(from, Math.min(to - 1, k + move[1]))]);
  });

  async function changed() {
    map = await loaded(data.maps[Number(place("kind").value) || 0]);
    const rank = place("rank").value;
    rows = map.rows.map((_, k) => k).filter((k) => rank === "" || String(map.rows[k][1]) === rank);
    from = 0; to = map.steps.length; at = null; chosen = rows[0] ?? null;
    place("meaning").textContent = map.meaning;
    coloured(); draw(); drawLine();
    document.documentElement.dataset.trend = map.kind;
  }

  data.maps.forEach((one, k) => place("kind").add(new Option(one.kind, String(k))));
  const first = data.maps.findIndex((one) => one.kind === "gradient_norm");
  place("kind").value = String(Math.max(0, first));
  for (const id of ["kind", "rank"]) place(id).addEventListener("change", changed);
  place("colour").addEventListener("change", () => { coloured(); draw(); });
  place("whole").addEventListener("click", () => zoom(0, map.steps.length - 1));
  new ResizeObserver(() => { if (map) { draw(); drawLine(); } }).observe(heat.parentElement);
  window.trueup.repaint.push(() => { if (map) { draw(); drawLine(); } });
  changed();
})();
