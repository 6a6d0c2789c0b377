"use strict";
// The charts: curves, histograms, errors in order of execution. What a click on them shows is told to the table.
(() => {
  const drawn = []; // views of charts, and where they stand
  const embed = async (id, target) => {
    const views = await Bokeh.embed.embed_item(await window.trueup.model(id), target), found = views[0] ?? views;
    const view = found.model ? found : [...found][0];
    drawn.push({ view, target });
    return view.model.document;
  };
  // A chart is as wide as the window; on paper its picture stands there, as wide as the paper.
  const onPaper = [];
  window.addEventListener("beforeprint", () => {
    for (const { view, target } of drawn) {
      const { canvas } = view.export("auto", true);
      Object.assign(canvas.style, { width: "100%", height: "auto" });
      target.after(canvas);
      target.style.display = "none";
      onPaper.push(() => { canvas.remove(); target.style.display = ""; });
    }
  });
  window.addEventListener("afterprint", () => { for (const back of onPaper.splice(0)) back(); });
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const INKS = { baseline: "--baseline", candidate: "--candidate", agrees: "--quiet", "passes on": "--bad-soft", incomparable: "--unsure", deviates: "--bad", culprit: "--bad",
    band: "--quiet", "left the band": "--bad", "level changes": "--unsure", spike: "--bad-soft" };

  const paint = (doc) => {
    const ink = colour("--quiet"), line = colour("--line");
    for (const plot of doc.roots()) {
      for (const axis of [...plot.below, ...plot.left]) {
        Object.assign(axis, { axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: line, major_tick_line_color: line });
      }
      for (const part of plot.center) if ("grid_line_color" in part && part.dimension === 1) part.grid_line_color = line;
      for (const legend of plot.above) legend.label_text_color = colour("--ink");
      for (const { name, glyph } of plot.renderers) {
        const value = { value: colour(INKS[name]) };
        glyph.line_color = value;
        if ("fill_color" in glyph) glyph.fill_color = value;
      }
    }
  };
  const draw = async (id, target) => {
    if (!document.getElementById(id) || !target) return null;
    const doc = await embed(id, target);
    // Five names beside each other are wider than a phone.
    if (window.innerWidth < 760) for (const plot of doc.roots()) for (const legend of plot.above) { legend.ncols = 2; legend.spacing = 8; }
    window.trueup.repaint.push(() => paint(doc));
    paint(doc);
    return doc;
  };
  // A point that is chosen: tell what its row in the source is, and forget the choice, so that it can be chosen again.
  const onTap = (doc, tell) => {
    for (const { data_source } of doc?.roots()[0].renderers ?? []) {
      data_source.selected.properties.indices.change.connect(() => {
        const [nth] = data_source.selected.indices;
        if (nth === undefined) return;
        data_source.selected.indices = [];
        tell(data_source.data, nth);
      });
    }
  };

  const histograms = (within) => {
    for (const target of within.querySelectorAll("[data-model]:not([data-drawn])")) {
      target.dataset.drawn = "";
      draw(target.dataset.model, target);
    }
  };

  window.trueup.drawCharts = async (go) => {
    for (const name of ["loss", "loss-difference", "norm", "norm-difference"]) {
      onTap(await draw(`${name}-model`, document.getElementById(`${name}-chart`)), (data, nth) => go({ step: data.step[nth] }));
    }
    const first = document.querySelector("#culprit .card");
    if (first) histograms(first);
    // What is folded has no width to draw in yet.
    for (const part of document.querySelectorAll("details.further")) part.addEventListener("toggle", () => { if (part.open) histograms(part); });
  };

  if (document.getElementById("histogram-model")) window.trueup.library().then(() => histograms(document)); // of `trueup diff`
  if (document.getElementById("curve-model")) { // of `trueup curves`
    window.trueup.library().then(() => {
      for (const name of ["curve", "difference"]) draw(`${name}-model`, document.getElementById(`${name}-chart`));
    });
  }

  const PLACES = 700, FLOOR = 1e-12;
  // Of the points of one kind that fall on one column of the picture the largest error is kept.
  const thinned = (calls, wanted) => {
    const { state, role, error_out, seq_candidate } = calls.column, best = new Map();
    let last = 1;
    for (let row = 0; row < calls.rows; row++) last = Math.max(last, seq_candidate.at[row]);
    for (let row = 0; row < calls.rows; row++) {
      const error = error_out.at[row], isCulprit = role.values[role.at[row]] === "culprit";
      const kind = isCulprit ? "culprit" : state.values[state.at[row]];
      if (kind !== wanted || !(error > 0)) continue;
      const place = isCulprit ? `c${row}` : Math.floor((seq_candidate.at[row] / last) * PLACES), known = best.get(place);
      if (known === undefined || error > error_out.at[known]) best.set(place, row);
    }
    return [...best.values()];
  };
  window.trueup.drawOverview = async (calls, choose) => {
    const doc = await draw("overview-model", document.getElementById("overview-chart"));
    const { op, scope, ordinal, error_out, seq_candidate } = calls.column;
    // What is infinite, or beyond all sense, stands above the rest and does not press it flat.
    const sized = error_out.at.filter((error) => error < 1e6), top = 100 * sized.reduce((most, error) => Math.max(most, error), 1);
    let drawn = 0;
    for (const { name, data_source } of doc.roots()[0].renderers) {
      const rows = thinned(calls, name);
      drawn += rows.length;
      data_source.data = {
        row: rows, seq: rows.map((row) => seq_candidate.at[row]),
        error: rows.map((row) => Math.min(Math.max(error_out.at[row], FLOOR), top)),
        told: rows.map((row) => window.trueup.sci(error_out.at[row])),
        call: rows.map((row) => `${scope.values[scope.at[row]]}/${op.values[op.at[row]]}#${ordinal.at[row]}`),
      };
    }
    for (const legend of doc.roots()[0].above) {
      legend.items = legend.items.filter(({ renderers }) => renderers.some(({ data_source }) => data_source.data.row.length));
    }
    if (!drawn) for (const id of ["overview-chart", "overview-note"]) document.getElementById(id).hidden = true;
    onTap(doc, (data, nth) => choose(data.row[nth]));
  };
})();
