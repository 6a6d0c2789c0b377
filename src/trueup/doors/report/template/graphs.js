"use strict";
// Both runs side by side, each a tree of modules and calls in its own order of execution. Rows are drawn where they are in sight, so
// a hundred thousand nodes cost arrays; what is chosen, opened or closed on one side is so on the other.
(() => {
  const place = document.getElementById("side-by-side");
  if (!place) return;
  const ROW = 26, MARGIN = 8, INDENT = 14, DEEPEST = 16;
  const SIDES = ["baseline", "candidate"], CHOICES = ["step", "phase", "level", "rank"];
  const form = place.querySelector("form"), chosenPane = document.getElementById("chosen");
  const text = ({ values, at }, row) => values[at[row]];

  // What a call is, from what matters least to what matters most.
  const KINDS = ["equal", "agrees", "passes", "alone", "unsure", "deviates", "culprit"];
  const EQUAL = 0, PASSES = 2, ALONE = 3, DEVIATES = 5, CULPRIT = 6;
  const kindOf = (calls, row) => {
    if (text(calls.column.role, row) === "culprit") return CULPRIT;
    const state = text(calls.column.state, row);
    return { equal: EQUAL, agrees: 1, "passes on": PASSES, "only baseline": ALONE, "only candidate": ALONE, incomparable: 4, deviates: DEVIATES }[state] ?? 4;
  };
  const toneOf = (kind, error) => {
    if (kind < DEVIATES) return KINDS[kind];
    return `${kind === CULPRIT ? "culprit " : ""}bad-${1 + (error >= 1e-4) + (error >= 1e-2)}`;
  };

  // Names are the candidate's, and the baseline's own where those are others.
  const own = (column, name, row, side) => (side === "baseline" && text(column[`${name}_baseline`], row)) || text(column[name], row);

  // Which module of one run is which of the other, by the calls in them, where their names differ.
  const linked = (calls) => {
    const { column } = calls, ways = { baseline: new Map(), candidate: new Map() };
    const link = (before, after) => {
      if (before === after) return;
      if (!ways.baseline.has(before)) ways.baseline.set(before, after);
      if (!ways.candidate.has(after)) ways.candidate.set(after, before);
    };
    const seen = new Set();
    for (let row = 0; row < calls.rows; row++) {
      const before = text(column.scope_baseline, row), after = text(column.scope, row), pair = `${before}\n${after}`;
      if (!before || seen.has(pair)) continue;
      seen.add(pair);
      const parts = [before.split("."), after.split(".")];
      link(before, after);
      if (parts[0].length === parts[1].length) for (let to = parts[0].length - 1; to > 0; to--) link(...parts.map((of) => of.slice(0, to).join(".")));
    }
    return ways;
  };

  // A tree as columns. Children stand in the order in which they were first executed, for rows come in that order.
  const grow = (calls, side, rows) => {
    const column = calls.column, seq = column[`seq_${side}`].at, kinds = rows.kinds;
    const mine = rows.filter((row) => seq[row] >= 0).sort((a, b) => seq[a] - seq[b] || a - b);
    const tree = { side, calls, name: [""], path: [""], parent: [-1], depth: [-1], row: [-1], kids: [[]], count: [0], differ: [0], kind: [0], error: [0], byPath: new Map([["", 0]]), byRow: new Map() };
    const add = (parent, name, path, row) => {
      const node = tree.name.length;
      tree.name.push(name); tree.path.push(path); tree.parent.push(parent); tree.depth.push(tree.depth[parent] + 1); tree.row.push(row);
      tree.kids.push(null); tree.count.push(0); tree.differ.push(0); tree.kind.push(0); tree.error.push(0);
      (tree.kids[parent] ??= []).push(node);
      return node;
    };
    const known = new Map(); // node of a scope
    const moduleOf = (code) => {
      let node = known.get(code);
      if (node !== undefined) return node;
      const scope = code;
      node = 0;
      let path = "";
      for (const part of scope ? scope.split(".") : []) {
        path = path ? `${path}.${part}` : part;
        let next = tree.byPath.get(path);
        if (next === undefined) { next = add(node, part || "(no name)", path, -1); tree.byPath.set(path, next); }
        node = next;
      }
      if (!scope) { node = tree.byPath.get(":outside") ?? add(0, "outside any module", "", -1); tree.byPath.set(":outside", node); }
      known.set(code, node);
      return node;
    };
    for (const row of mine) {
      const above = moduleOf(own(column, "scope", row, side)), leaf = add(above, `${own(column, "op", row, side)}#${column.ordinal.at[row]}`, "", row);
      tree.byRow.set(row, leaf);
      const kind = kinds[row], error = column.error_out.at[row] || 0, differs = kind >= PASSES;
      for (let node = leaf; node >= 0; node = tree.parent[node]) {
        tree.count[node] += 1;
        tree.differ[node] += differs;
        if (kind > tree.kind[node]) { tree.kind[node] = kind; tree.error[node] = error; } else if (kind === tree.kind[node] && error > tree.error[node]) tree.error[node] = error;
      }
    }
    tree.open = new Uint8Array(tree.name.length);
    return tree;
  };

  const inSight = (tree) => {
    const shown = [], pending = [...(tree.kids[0] ?? [])].reverse();
    while (pending.length) {
      const node = pending.pop();
      shown.push(node);
      const kids = tree.open[node] && tree.kids[node];
      if (kids) for (let nth = kids.length - 1; nth >= 0; nth--) pending.push(kids[nth]);
    }
    return shown;
  };

  const make = (kind, className, content) => {
    const made = document.createElement(kind);
    made.className = className;
    made.textContent = content;
    return made;
  };

  const pane = (side, tell) => {
    const box = place.querySelector(`[data-side="${side}"]`), long = document.createElement("div");
    box.append(long);
    const view = { box, tree: null, shown: [], chosen: -1, hits: new Set() };
    const rowOf = (node, nth) => {
      const { tree } = view, row = make("div", "node", ""), folder = tree.kids[node] !== null;
      row.id = `${side}-${node}`;
      row.setAttribute("role", "treeitem");
      row.setAttribute("aria-level", tree.depth[node] + 1);
      row.setAttribute("aria-selected", String(node === view.chosen));
      if (folder) row.setAttribute("aria-expanded", String(Boolean(tree.open[node])));
      row.style.top = `${nth * ROW}px`;
      row.style.paddingLeft = `${6 + INDENT * Math.min(tree.depth[node], DEEPEST)}px`;
      if (view.hits.has(node)) row.classList.add("hit");
      const tone = toneOf(tree.kind[node], tree.error[node]), error = window.trueup.sci(tree.error[node]);
      const said = tree.kind[node] === ALONE ? `${folder ? `${tree.differ[node].toLocaleString("en")} ` : ""}only here` : tree.kind[node] === 4 ? "?" : tree.kind[node] === EQUAL ? "equal" : tree.kind[node] === CULPRIT && !tree.error[node] ? "culprit" : error;
      row.append(make("i", "twist", folder ? (tree.open[node] ? "▾" : "▸") : ""), make("span", folder ? "name" : "name call", tree.name[node]));
      if (folder) row.append(make("small", "", tree.count[node].toLocaleString("en")));
      row.append(make("b", `cell ${tone}`, said));
      row.title = tree.path[node] || tree.name[node];
      return row;
    };
    view.draw = () => {
      const from = Math.max(0, Math.floor(box.scrollTop / ROW) - MARGIN), to = Math.ceil((box.scrollTop + box.clientHeight) / ROW) + MARGIN;
      long.style.height = `${view.shown.length * ROW}px`;
      long.replaceChildren(...view.shown.slice(from, to).map((node, nth) => rowOf(node, from + nth)));
      if (view.chosen >= 0) box.setAttribute("aria-activedescendant", `${side}-${view.chosen}`); else box.removeAttribute("aria-activedescendant");
    };
    view.refold = () => { view.shown = inSight(view.tree); view.draw(); };
    view.show = (node, middle) => {
      let opened = false;
      for (let above = view.tree.parent[node]; above > 0; above = view.tree.parent[above]) { opened ||= !view.tree.open[above]; view.tree.open[above] = 1; }
      view.chosen = node;
      if (opened) view.shown = inSight(view.tree);
      const top = view.shown.indexOf(node) * ROW;
      if (middle || top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight) {
        long.style.height = `${view.shown.length * ROW}px`;
        box.scrollTop = top - (box.clientHeight - ROW) / 2;
      }
      view.draw();
    };
    let waiting = 0;
    box.addEventListener("scroll", () => { waiting ||= requestAnimationFrame(() => { waiting = 0; view.draw(); }); });
    new ResizeObserver(() => { if (view.tree) view.draw(); }).observe(box);
    box.addEventListener("click", (event) => {
      const row = event.target.closest(".node");
      if (!row) return;
      const node = Number(row.id.slice(side.length + 1));
      if (event.target.closest(".twist") || node === view.chosen) tell.fold(view, node);
      tell.choose(view, node);
    });
    box.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || !view.shown.length) return;
      const { tree, chosen, shown } = view, at = shown.indexOf(chosen), page = Math.max(1, Math.floor(box.clientHeight / ROW) - 1);
      const go = (nth) => tell.choose(view, shown[Math.min(shown.length - 1, Math.max(0, nth))]);
      const folder = chosen >= 0 && tree.kids[chosen] !== null, open = folder && tree.open[chosen];
      const moves = {
        ArrowDown: () => go(at + 1), ArrowUp: () => go(at - 1), PageDown: () => go(at + page), PageUp: () => go(at - page), Home: () => go(0), End: () => go(shown.length - 1),
        ArrowRight: () => (folder && !open ? tell.fold(view, chosen) : go(at + Number(Boolean(folder)))),
        ArrowLeft: () => (open ? tell.fold(view, chosen) : tree.parent[chosen] > 0 && tell.choose(view, tree.parent[chosen])),
        Enter: () => folder && tell.fold(view, chosen),
      };
      if (!(event.key in moves)) return;
      event.preventDefault();
      moves[event.key]();
    });
    return view;
  };

  const draw = async () => {
    const calls = await window.trueup.calls(), column = calls.column, kinds = new Uint8Array(calls.rows);
    for (let row = 0; row < calls.rows; row++) kinds[row] = kindOf(calls, row);
    // A culprit that one run alone has, or a run of calls, is told by its place in the order of execution.
    const { first: named } = place.dataset, given = named ? JSON.parse(named) : null;
    const isFirst = (row) => Object.entries(given).every(([name, value]) => column[name].at[row] === value);
    const isEither = (row) => ["baseline", "candidate"].some((side) => given[`seq_${side}`] >= 0 && column[`seq_${side}`].at[row] === given[`seq_${side}`])
      && column.rank.at[row] === given.rank && column.step.at[row] === given.step;
    const all = Array.from(kinds.keys()), begin = given ? all.find(isFirst) ?? all.find(isEither) ?? -1 : -1;
    if (begin >= 0) kinds[begin] = CULPRIT;
    const ways = linked(calls), there = (of, node) => ways[of.side].get(of.path[node]) ?? of.path[node];
    const nodeOf = ({ tree }, of, node) => (of.row[node] >= 0 ? tree.byRow.get(of.row[node]) : tree.byPath.get(there(of, node) || ":outside"));
    const other = (view) => views[Number(view === views[0])];
    const tell = {
      fold: (view, node) => {
        if (view.tree.kids[node] === null) return;
        const open = view.tree.open[node] ? 0 : 1, linked = nodeOf(other(view), view.tree, node);
        view.tree.open[node] = open;
        if (linked !== undefined) { other(view).tree.open[linked] = open; other(view).refold(); }
        view.refold();
      },
      choose: (view, node, middle = false) => {
        const linked = nodeOf(other(view), view.tree, node);
        view.show(node, middle);
        if (linked !== undefined) other(view).show(linked, true); else { other(view).chosen = -1; other(view).draw(); }
        describe(view, node, linked);
      },
    };
    const views = SIDES.map((side) => pane(side, tell));

    const describe = (view, node, linked) => {
      const { tree } = view, facts = document.createElement("p"), row = tree.row[node];
      const alone = linked === undefined ? `, only in the ${tree.side}` : "";
      if (row >= 0) {
        facts.textContent = `A call${alone}.`;
        chosenPane.replaceChildren(facts, window.trueup.describe(calls, row));
        return;
      }
      const counts = [`${tree.count[node].toLocaleString("en")} calls`, `${tree.differ[node].toLocaleString("en")} differ by more than rounding or have no counterpart`];
      if (linked !== undefined && other(view).tree.count[linked] !== tree.count[node]) counts.push(`${other(view).tree.count[linked].toLocaleString("en")} calls in the ${other(view).tree.side}`);
      facts.textContent = `${tree.path[node] || tree.name[node]}${alone}: ${counts.join("; ")}. `;
      if (tree.path[node] && document.getElementById("calls-model")) {
        const link = make("a", "go", "Its calls in the table");
        link.href = "#calls";
        link.dataset.go = JSON.stringify({ module: tree.side === "baseline" ? there(tree, node) : tree.path[node] });
        facts.append(link);
      }
      chosenPane.replaceChildren(facts);
    };

    // The first culprit's step, at the level of functions: elsewhere a reader asks for it.
    const culprit = begin >= 0 ? begin : kinds.indexOf(CULPRIT), levels = new Set(column.level.at), code = (name) => column.level.values.indexOf(name);
    const level = culprit >= 0 ? column.level.at[culprit] : ["api", "aten", "module"].map(code).find((one) => levels.has(one));
    const first = { step: culprit >= 0 ? column.step.at[culprit] : undefined, level, rank: culprit >= 0 ? column.rank.at[culprit] : undefined };
    for (const name of CHOICES) {
      const { values, at } = column[name], select = form.elements[name], seen = [...new Set(at)].sort((a, b) => a - b);
      select.replaceChildren(...(name === "phase" ? [new Option("all", "")] : []), ...seen.map((one) => new Option(values ? values[one] : String(one), String(one))));
      if (first[name] !== undefined) select.value = String(first[name]);
      select.closest("label").hidden = seen.length < 2;
    }

    const grown = () => {
      const wanted = CHOICES.filter((name) => form.elements[name].value !== "").map((name) => [column[name].at, Number(form.elements[name].value)]);
      const rows = [];
      for (let row = 0; row < calls.rows; row++) if (wanted.every(([at, one]) => at[row] === one)) rows.push(row);
      rows.kinds = kinds;
      views.forEach((view, nth) => {
        view.tree = grow(calls, SIDES[nth], rows);
        view.chosen = -1;
        view.box.scrollTop = 0;
        if (view.tree.kids[0].length === 1) view.tree.open[view.tree.kids[0][0]] = 1;
        view.refold();
      });
      seek();
      const [start] = rows.includes(begin) ? [begin] : rows.filter((row) => kinds[row] === CULPRIT).sort((a, b) => column.seq_candidate.at[a] - column.seq_candidate.at[b]);
      if (start === undefined) return;
      const view = views[Number(column.seq_candidate.at[start] >= 0)];
      tell.choose(view, view.tree.byRow.get(start), true);
    };

    let hits = [], current = -1;
    const seek = () => {
      const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean).slice(0, 30);
      const has = (low) => words.every((word) => low.includes(word));
      hits = [];
      for (const view of views) {
        const { tree } = view;
        view.hits = new Set();
        for (let node = 1; words.length && node < tree.name.length; node++) {
          const row = tree.row[node], low = (row >= 0 ? `${own(column, "scope", row, tree.side)}/${tree.name[node]}` : tree.path[node]).toLowerCase();
          if (!has(low)) continue;
          view.hits.add(node);
          if (view === views[1] || nodeOf(other(view), tree, node) === undefined) hits.push([view, node]);
        }
        view.draw();
      }
      current = -1;
      form.elements.found.value = words.length ? `${hits.length.toLocaleString("en")} found` : "";
    };
    const jump = (by) => {
      if (!hits.length) return;
      current = (current + by + hits.length + (current < 0 && by < 0 ? 1 : 0)) % hits.length;
      tell.choose(...hits[current], true);
      form.elements.found.value = `${(current + 1).toLocaleString("en")} of ${hits.length.toLocaleString("en")}`;
    };
    let waiting;
    form.elements.words.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(seek, 80); });
    form.addEventListener("submit", (event) => { event.preventDefault(); jump(1); });
    form.elements.words.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      if (current < 0) { clearTimeout(waiting); seek(); }
      jump(event.shiftKey ? -1 : 1);
    });
    form.elements.on.addEventListener("click", () => jump(1));
    form.elements.back.addEventListener("click", () => jump(-1));
    for (const name of CHOICES) form.elements[name].addEventListener("change", grown);
    const refold = (wanted) => {
      for (const view of views) {
        for (let node = 1; node < view.tree.name.length; node++) view.tree.open[node] = Number(wanted(view.tree, node));
        view.refold();
      }
    };
    form.elements.unfold.addEventListener("click", () => refold((tree, node) => tree.kids[node] !== null && tree.differ[node] > 0));
    form.elements.fold.addEventListener("click", () => refold(() => false));
    grown();
    place.dataset.ready = "";
  };

  // What nobody looks at costs nothing.
  const looked = new IntersectionObserver((seen) => {
    if (!seen.some((one) => one.isIntersecting)) return;
    looked.disconnect();
    draw().catch((error) => { place.hidden = true; console.error(error); });
  }, { rootMargin: "600px" });
  looked.observe(place);
})();
