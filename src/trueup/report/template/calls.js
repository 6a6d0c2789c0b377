"use strict";
// The chart, and the table of calls with its filters. Rows live in typed arrays; the table gets those that pass.
(async () => {
  const block = (id) => { const found = document.getElementById(id); return found ? JSON.parse(found.textContent) : null; };
  const embed = async (id, target) => {
    const nth = Bokeh.documents.length;
    await Bokeh.embed.embed_item(block(id), target);
    return Bokeh.documents[nth];
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const paintChart = (doc) => {
    const ink = colour("--quiet"), plot = doc.get_model_by_name("loss");
    for (const axis of [...plot.below, ...plot.left]) {
      Object.assign(axis, { axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: colour("--line"), major_tick_line_color: colour("--line") });
    }
    for (const part of plot.center) if ("grid_line_color" in part && part.dimension === 1) part.grid_line_color = colour("--line");
    for (const legend of plot.above) legend.label_text_color = colour("--ink");
    for (const { name, glyph } of plot.renderers) {
      glyph.line_color = { value: colour(`--${name}`) };
      if ("fill_color" in glyph) glyph.fill_color = { value: colour(`--${name}`) };
    }
  };
  const drawChart = async () => {
    if (!document.getElementById("loss-model")) return;
    const doc = await embed("loss-model", "loss-chart");
    const paint = () => paintChart(doc);
    window.trueup.repaint.push(paint);
    paint();
  };

  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  };
  const unpack = async ({ kind, data, values }) => {
    const buffer = await inflate(data);
    return { values, at: kind === "float32" ? new Float32Array(buffer) : new Int32Array(buffer) };
  };
  const load = async () => {
    const { rows, total, columns } = block("calls-data"), held = { rows, total, column: {} };
    await Promise.all(Object.entries(columns).map(async ([name, packed]) => { held.column[name] = await unpack(packed); }));
    return held;
  };

  const CHOICES = ["state", "role", "phase", "level", "step", "rank"];
  const fill = (form, calls) => {
    for (const name of CHOICES) {
      const { values, at } = calls.column[name], select = form.elements[name];
      const seen = [...new Set(at)].sort((a, b) => a - b);
      const options = seen.map((code) => [values ? values[code] : String(code), code]).filter(([text]) => text !== "");
      select.replaceChildren(new Option("all", ""), ...options.map(([text, code]) => new Option(text, String(code))));
      select.closest("label").hidden = options.length < (name === "role" ? 1 : 2);
    }
    // Chosen, but not the default: "Show all" is the form's reset.
    const deviating = [...form.elements.state.options].find((option) => option.text === "deviates");
    if (deviating) form.elements.state.value = deviating.value;
  };

  // For each distinct text, which of the words it contains: one bit a word.
  const marks = (values, words) => Uint32Array.from(values, (text) => {
    const low = text.toLowerCase();
    return words.reduce((bits, word, k) => (low.includes(word) ? bits | (1 << k) : bits), 0);
  });
  const passing = (form, calls) => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean).slice(0, 30), all = (1 << words.length) - 1;
    const { scope, op } = calls.column, inScope = marks(scope.values, words), inOp = marks(op.values, words);
    const chosen = CHOICES.filter((name) => form.elements[name].value !== "").map((name) => [calls.column[name].at, Number(form.elements[name].value)]);
    const kept = [];
    for (let row = 0; row < calls.rows; row++) {
      if (chosen.every(([at, code]) => at[row] === code) && (inScope[scope.at[row]] | inOp[op.at[row]]) === all) kept.push(row);
    }
    return kept;
  };

  const text = ({ values, at }, row) => values[at[row]];
  const filled = (calls, rows) => {
    const column = calls.column, data = { call: rows.map((row) => `${text(column.op, row)}#${column.ordinal.at[row]}`) };
    for (const name of ["phase", "level", "scope", "state", "role"]) data[name] = rows.map((row) => text(column[name], row));
    for (const name of ["step", "rank", "seq_candidate", "error_in", "error_out", "ratio"]) data[name] = rows.map((row) => column[name].at[row]);
    const tints = { culprit: "var(--bad)", victim: "inherit", deviates: "var(--bad)", incomparable: "var(--unsure)" };
    data.tint = rows.map((row, nth) => tints[data.role[nth]] ?? tints[data.state[nth]] ?? "inherit");
    return data;
  };

  const short = (value) => (Number.isNaN(value) ? "–" : value === 0 ? "0" : value.toExponential(1));
  const describe = (calls, row) => {
    const column = calls.column, seq = (name) => (column[name].at[row] < 0 ? "absent" : column[name].at[row].toLocaleString("en"));
    const facts = [
      ["scope", text(column.scope, row) || "outside any module"], ["error in", short(column.error_in.at[row])],
      ["call", `${text(column.op, row)}#${column.ordinal.at[row]}`], ["error out", short(column.error_out.at[row])],
      ["source", text(column.source, row) || "–"], ["expected", short(column.expected.at[row])],
      ["order", `${seq("seq_baseline")} in the baseline, ${seq("seq_candidate")} in the candidate`], ["rule", text(column.rule, row) || "–"],
    ];
    const list = document.createElement("dl");
    for (const [name, value] of facts) {
      const term = document.createElement("dt"), description = document.createElement("dd");
      term.textContent = name; description.textContent = value;
      list.append(term, description);
    }
    return list;
  };

  // Scope and call share what the other columns leave; SlickGrid's own ways to fit columns forget the proportions.
  const FLEXIBLE = { scope: 0.42, call: 0.58 }, SCROLLBAR = 20, LEAST = 150;
  const fit = (table) => {
    const taken = table.columns.reduce((sum, { field, width }) => sum + (field in FLEXIBLE ? 0 : width), 0);
    const free = document.getElementById("calls-table").clientWidth - taken - SCROLLBAR;
    for (const column of table.columns) {
      const share = FLEXIBLE[column.field];
      if (share) column.width = Math.max(LEAST, Math.floor(free * share));
    }
  };

  const drawTable = async () => {
    const [doc, calls] = await Promise.all([embed("calls-model", "calls-table"), load()]);
    const table = doc.get_model_by_name("calls"), source = table.source;
    const form = document.getElementById("filters"), detail = document.getElementById("detail"), hint = detail.firstElementChild;
    let rows = [];
    const apply = () => {
      rows = passing(form, calls);
      source.selected.indices = [];
      source.data = filled(calls, rows);
      const beyond = calls.total > calls.rows ? `; ${(calls.total - calls.rows).toLocaleString("en")} more in calls.parquet` : "";
      document.getElementById("shown").textContent = `${rows.length.toLocaleString("en")} of ${calls.total.toLocaleString("en")}${beyond}`;
    };
    source.selected.properties.indices.change.connect(() => {
      const [nth] = source.selected.indices;
      detail.replaceChildren(nth === undefined ? hint : describe(calls, rows[nth]));
    });
    fill(form, calls);
    fit(table);
    let narrowing, waiting;
    window.addEventListener("resize", () => { clearTimeout(narrowing); narrowing = setTimeout(() => fit(table), 150); });
    form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 60); });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(apply));
    apply();
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  };

  try {
    await drawChart();
    await drawTable();
  } catch (error) {
    document.documentElement.classList.add("failed"); // the plain tables take over
    console.error(error);
  }
})();
