"use strict";
// The table of calls with its filters. Rows live in typed arrays; the table gets those that pass, in the order asked for.
(async () => {
  const CHOICES = ["state", "role", "phase", "level", "step", "rank", "paired"];
  const fill = (form, calls) => {
    for (const name of CHOICES) {
      const { values, at } = calls.column[name], select = form.elements[name];
      const seen = [...new Set(at)].sort((a, b) => a - b);
      const options = seen.map((code) => [values ? values[code] : String(code), code]).filter(([text]) => text !== "");
      select.replaceChildren(new Option("all", ""), ...options.map(([text, code]) => new Option(text, String(code))));
      select.closest("label").hidden = options.length < (name === "role" ? 1 : 2);
    }
    // Chosen, but not the default: "Show all" is the form's reset.
    choose(form.elements.state, "deviates");
  };
  const choose = (select, text) => {
    const found = [...select.options].find((option) => option.text === String(text));
    if (found) select.value = found.value;
    return Boolean(found);
  };

  // For each distinct text, which of the words it contains: one bit a word.
  const marks = (values, words) => Uint32Array.from(values, (text) => {
    const low = text.toLowerCase();
    return words.reduce((bits, word, k) => (low.includes(word) ? bits | (1 << k) : bits), 0);
  });
  const passing = (form, calls) => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean).slice(0, 30), all = (1 << words.length) - 1;
    const { scope, op, error_out } = calls.column, inScope = marks(scope.values, words), inOp = marks(op.values, words);
    const module = form.elements.module.value, least = Number.parseFloat(form.elements.least.value);
    const within = Uint8Array.from(scope.values, (text) => !module || text === module || text.startsWith(`${module}.`));
    const chosen = CHOICES.filter((name) => form.elements[name].value !== "").map((name) => [calls.column[name].at, Number(form.elements[name].value)]);
    const kept = [];
    for (let row = 0; row < calls.rows; row++) {
      if (!within[scope.at[row]] || (inScope[scope.at[row]] | inOp[op.at[row]]) !== all) continue;
      // Not comparable (NaN) passes: it may be any size.
      if (error_out.at[row] < least || !chosen.every(([at, code]) => at[row] === code)) continue;
      kept.push(row);
    }
    const by = form.elements.sort.value;
    if (by) {
      const { at } = calls.column[by], rising = by === "seq_candidate", key = (row) => (Number.isNaN(at[row]) ? Infinity : at[row]);
      kept.sort((a, b) => (rising ? key(a) - key(b) : key(b) - key(a)) || a - b);
    }
    return kept;
  };

  const text = ({ values, at }, row) => values[at[row]];
  const filled = (calls, rows) => {
    const column = calls.column, data = { call: rows.map((row) => `${text(column.op, row)}#${column.ordinal.at[row]}`) };
    for (const name of ["phase", "level", "scope", "state", "role"]) data[name] = rows.map((row) => text(column[name], row));
    // Bokeh looks for references to models in each element of a plain array, and in none of a typed one.
    for (const name of ["step", "rank", "seq_candidate", "error_in", "error_out", "ratio"]) {
      const { at } = column[name], kept = new at.constructor(rows.length);
      for (let nth = 0; nth < rows.length; nth++) kept[nth] = at[rows[nth]];
      data[name] = kept;
    }
    const tints = { culprit: "var(--bad)", victim: "inherit", deviates: "var(--bad)", incomparable: "var(--unsure)" };
    data.tint = rows.map((row, nth) => tints[data.role[nth]] ?? tints[data.state[nth]] ?? "inherit");
    return data;
  };

  const short = window.trueup.sci;
  const describe = (calls, row) => {
    const column = calls.column, seq = (name) => (column[name].at[row] < 0 ? "absent" : column[name].at[row].toLocaleString("en"));
    const before = (name) => (text(column[name], row) ? ` (${text(column[name], row)} in the baseline)` : "");
    const facts = [
      ["scope", (text(column.scope, row) || "outside any module") + before("scope_baseline")], ["error in", short(column.error_in.at[row])],
      ["call", `${text(column.op, row)}#${column.ordinal.at[row]}${before("op_baseline")}`], ["error out", short(column.error_out.at[row])],
      ["source", text(column.source, row) || "–"], ["expected", short(column.expected.at[row])],
      ["order", `${seq("seq_baseline")} in the baseline, ${seq("seq_candidate")} in the candidate`], ["rule", text(column.rule, row) || "–"],
    ];
    const list = document.createElement("dl");
    if (text(column.paired, row)) facts.push(["paired by", text(column.paired, row)]);
    for (const [name, value] of facts) {
      const term = document.createElement("dt"), description = document.createElement("dd");
      term.textContent = name; description.textContent = value;
      list.append(term, description);
    }
    return list;
  };
  window.trueup.describe = describe;

  // Scope and call share what the other columns leave; SlickGrid's own ways to fit columns forget the proportions.
  const FLEXIBLE = { scope: 0.42, call: 0.58 }, SCROLLBAR = 20, LEAST = 150;
  const WIDE = new Set(["seq_candidate", "step", "rank", "phase", "level", "error_in", "state"]); // what a phone has no room for
  const fit = (table) => {
    const narrow = window.innerWidth < 760;
    for (const column of table.columns) if (WIDE.has(column.field)) column.visible = !narrow;
    const taken = table.columns.reduce((sum, { field, width, visible }) => sum + (field in FLEXIBLE || !visible ? 0 : width), 0);
    const free = document.getElementById("calls-table").clientWidth - taken - SCROLLBAR;
    for (const column of table.columns) {
      const share = FLEXIBLE[column.field];
      if (share) column.width = Math.max(narrow ? LEAST / 2 : LEAST, Math.floor(free * share));
    }
  };

  // SlickGrid sorts by a click on a heading; Enter and Space do the same. It makes its headings anew when columns change.
  const roots = (element) => [...element.querySelectorAll("*")].flatMap((one) => (one.shadowRoot ? [one.shadowRoot, ...roots(one.shadowRoot)] : []));
  const sortByKeyboard = (target) => {
    const reach = (root) => {
      for (const heading of root.querySelectorAll(".slick-header-column.slick-header-sortable")) {
        heading.tabIndex = 0;
        heading.setAttribute("role", "button");
        heading.setAttribute("aria-label", `sort by ${heading.textContent.trim()}`);
      }
    };
    for (const root of roots(target)) {
      root.addEventListener("keydown", (event) => {
        const heading = event.target.closest?.(".slick-header-column");
        if (!heading || (event.key !== "Enter" && event.key !== " ")) return;
        event.preventDefault();
        event.stopPropagation();
        const name = heading.getAttribute("aria-label");
        heading.click();
        // The heading may be another one now.
        [...root.querySelectorAll(".slick-header-column")].find((one) => one.getAttribute("aria-label") === name)?.focus();
      }, true);
      reach(root);
      new MutationObserver(() => reach(root)).observe(root, { childList: true, subtree: true });
    }
  };

  // Bokeh makes an object of each row before it sorts, and when there are other rows: a second for 100,000. The columns are enough.
  const compared = (one, other) => {
    if (typeof one === "number") return one - other || Number.isNaN(one) - Number.isNaN(other);
    return one < other ? -1 : Number(one > other);
  };
  const sortByColumns = (provider) => {
    if (!provider?.index || !provider.sort) return; // another Bokeh: it sorts as it does
    // Of the class: each change of a width makes a new one.
    Object.getPrototypeOf(provider).sort = function sort(columns) {
      const by = columns.map(({ sortCol, sortAsc }) => [this.source.data[sortCol.field], sortAsc ? 1 : -1]);
      const order = (one, other) => {
        for (const [at, sign] of by) {
          const found = sign * compared(at[one], at[other]);
          if (found) return found;
        }
        return one - other;
      };
      this.index.sort(order);
    };
  };

  const drawTable = async () => {
    const target = document.getElementById("calls-table");
    // Bokeh writes 1.0e+0 where everything else says 1e0.
    const { ScientificFormatter, StringFormatter } = Bokeh.Tables;
    ScientificFormatter.prototype.doFormat = function doFormat(row, cell, value, ...rest) {
      return StringFormatter.prototype.doFormat.call(this, row, cell, short(value), ...rest);
    };
    await Bokeh.embed.embed_item(await window.trueup.model("calls-model"), target);
    const calls = await window.trueup.calls(), table = Bokeh.documents.map((one) => one.get_model_by_name("calls")).find(Boolean), source = table.source;
    sortByColumns([...Bokeh.index].find((view) => view.model === table)?.data);
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
      const [chosen] = source.selected.indices;
      detail.replaceChildren(chosen === undefined ? hint : describe(calls, rows[chosen]));
    });
    fill(form, calls);
    fit(table);
    sortByKeyboard(target);
    let narrowing, waiting;
    window.addEventListener("resize", () => { clearTimeout(narrowing); narrowing = setTimeout(() => fit(table), 150); });
    form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 60); });
    form.addEventListener("submit", (event) => event.preventDefault());
    let revealing = false;
    form.addEventListener("reset", () => { if (!revealing) setTimeout(apply); });
    apply();

    // What links, the tree and charts show: set these filters, clear the others, and choose the call named by `seq`.
    const reveal = (filters, row) => {
      revealing = true;
      form.reset();
      revealing = false;
      for (const [name, value] of Object.entries(filters)) {
        const field = form.elements[name];
        if (field?.options) choose(field, value); else if (field) field.value = value;
      }
      apply();
      const at = row ?? (filters.seq === undefined ? -1 : rows.find((one) => calls.column.seq_candidate.at[one] === filters.seq));
      const place = rows.indexOf(at);
      if (place >= 0) source.selected.indices = [place];
      document.getElementById("calls-title").scrollIntoView();
      form.elements.text.focus({ preventScroll: true });
    };
    document.addEventListener("click", (event) => {
      const link = event.target.closest?.("[data-go]");
      if (!link) return;
      event.preventDefault();
      reveal(JSON.parse(link.dataset.go));
    });
    const chosen = (row) => {
      const { scope, phase, step } = calls.column;
      reveal({ module: text(scope, row), phase: text(phase, row), step: step.at[row] }, row);
    };
    return { calls, reveal, chosen };
  };

  if (!document.getElementById("calls-model")) return;
  // Of an aligned page the table is folded: it is drawn when somebody opens it, or follows a link into it.
  const folded = document.getElementById("more"), opened = (part) => new Promise((done) => { part.addEventListener("toggle", done, { once: true }); });
  let drawn;
  const table = () => (drawn ??= (folded && !folded.open ? opened(folded) : Promise.resolve()).then(drawTable));
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]'), wanted = link?.getAttribute("href").slice(1);
    if (!wanted || !folded?.contains(document.getElementById(wanted)) || folded.dataset.ready !== undefined) return;
    folded.open = true;
    if (link.dataset.go) table().then(({ reveal }) => reveal(JSON.parse(link.dataset.go)));
  });
  try {
    await window.trueup.library();
    await window.trueup.drawCharts(async (filters) => { if (folded) folded.open = true; (await table()).reveal(filters); });
    if (folded) table().then(({ calls, chosen }) => window.trueup.drawOverview(calls, chosen)).then(() => { folded.dataset.ready = ""; });
    else { const { calls, chosen } = await table(); await window.trueup.drawOverview(calls, chosen); }
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  } catch (error) {
    document.documentElement.classList.add("failed"); // the plain tables take over
    console.error(error);
  }
})();
