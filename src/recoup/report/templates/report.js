"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const units = [["TiB", 2 ** 30, 2], ["GiB", 2 ** 20, 2], ["MiB", 2 ** 10, 1]];
  const bytes = (kib) => {
    for (const [name, size, digits] of units) if (Math.abs(kib) >= size) return `${(kib / size).toFixed(digits)} ${name}`;
    return `${kib} KiB`;
  };
  const time = (us) => us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${us} us`;

  // Reading one moment of a chart: the slider holds it, the pointer moves the slider.
  document.querySelectorAll(".chart").forEach((figure) => {
    const chart = data[+figure.dataset.chart];
    const slider = figure.querySelector("input"), output = figure.querySelector("output");
    const svgs = [...figure.querySelectorAll("svg")];
    const find = (us) => {
      let low = 0, high = chart.t.length - 1;
      while (low < high) { const mid = (low + high + 1) >> 1; if (chart.t[mid] <= us) low = mid; else high = mid - 1; }
      return low;
    };
    const show = (moment) => {
      const us = typeof moment === "number" ? moment : +slider.value;
      const at = find(us);
      const values = chart.series.map((s) => s[at]);
      const total = values.reduce((a, b) => a + b, 0);
      let phase = "";
      for (const [name, begin] of chart.phases) { if (begin > us) break; phase = name; }
      const parts = values.map((v, i) => [v, chart.names[i]]).filter(([v]) => v > 0).sort((a, b) => b[0] - a[0]);
      output.replaceChildren();
      const strong = document.createElement("b");
      strong.textContent = `${time(us)}, ${phase}: ${bytes(total)}`;
      output.append(strong, ` predicted: ${parts.map(([v, n]) => `${n} ${bytes(v)}`).join(", ")}`);
      slider.setAttribute("aria-valuetext", output.textContent);
      for (const svg of svgs) {
        const box = svg.viewBox.baseVal, left = +svg.dataset.left, right = +svg.dataset.right;
        const x = left + us / 1e6 / +svg.dataset.max * (box.width - left - right);
        const line = svg.querySelector(".cursor");
        line.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
        line.setAttribute("visibility", "visible");
      }
    };
    slider.addEventListener("input", show);
    for (const svg of svgs) svg.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect(), box = svg.viewBox.baseVal;
      const left = +svg.dataset.left, right = +svg.dataset.right;
      const x = (event.clientX - place.left) / place.width * box.width;
      const us = (x - left) / (box.width - left - right) * +svg.dataset.max * 1e6;
      slider.value = Math.min(Math.max(us, 0), chart.end);
      show();
    });
    slider.value = chart.peak;
    show(chart.peak);
  });

  // A point of the curve is a link to its plan, which opens.
  const open = () => {
    const plan = /^#plan-\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (!plan) return;
    plan.open = true;
    plan.querySelector("summary").focus({ preventScroll: true });
  };
  addEventListener("hashchange", open);
  document.querySelectorAll("svg a").forEach((link) => link.addEventListener("click", () => setTimeout(open)));
  open();

  // The module tree: rows in call order with a depth each; sorting orders siblings, folding hides what is below.
  const table = document.getElementById("tree");
  if (!table) return;
  const body = table.tBodies[0];
  const root = { depth: -1, children: [], open: true };
  const nodes = [];
  const stack = [root];
  for (const row of body.rows) {
    const depth = +row.dataset.d;
    while (stack[stack.length - 1].depth >= depth) stack.pop();
    const parent = stack[stack.length - 1];
    const head = row.cells[0];
    const node = { row, depth, parent, children: [], open: true, order: nodes.length, name: head.textContent };
    parent.children.push(node);
    nodes.push(node);
    stack.push(node);
  }
  const label = (node) => node.row.cells[0].querySelector(".path").textContent;
  for (const node of nodes) {
    const head = node.row.cells[0];
    if (!node.children.length) { head.className = "leaf"; continue; }
    const turn = document.createElement("button");
    turn.type = "button";
    turn.className = "turn";
    turn.setAttribute("aria-label", `Inside ${label(node)}`);
    turn.addEventListener("click", () => { node.open = !node.open; render(); });
    head.prepend(turn);
    node.turn = turn;
  }
  let query = "";
  const render = () => {
    const seen = new Set();
    if (query) for (const node of nodes) {
      if (!`${label(node)} ${node.name}`.toLowerCase().includes(query)) continue;
      for (let n = node; n.row; n = n.parent) seen.add(n);
    }
    const walk = (node, visible) => {
      for (const child of node.children) {
        const shown = query ? seen.has(child) : visible;
        child.row.hidden = !shown;
        if (child.turn) child.turn.setAttribute("aria-expanded", String(query ? true : child.open));
        walk(child, shown && child.open);
      }
    };
    walk(root, true);
  };
  const foldTo = (limit) => {
    const counts = [];
    for (const node of nodes) counts[node.depth] = (counts[node.depth] || 0) + 1;
    let depth = 0, sum = 0;
    while (depth < counts.length && sum + counts[depth] <= limit) sum += counts[depth++];
    for (const node of nodes) node.open = node.depth < Math.max(depth - 1, 1);
    render();
  };
  const keys = [...table.tHead.rows[0].cells];
  const value = (node, column, key) => {
    if (key === "name") return node.name.toLowerCase();
    const cell = node.row.cells[column];
    return key === "action" ? cell.textContent : +cell.dataset.v;
  };
  const sort = (column, key, direction) => {
    const compare = (a, b) => {
      if (!direction) return a.order - b.order;
      const x = value(a, column, key), y = value(b, column, key);
      const order = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return direction * order || a.order - b.order;
    };
    const rows = document.createDocumentFragment();
    const walk = (node) => { for (const child of [...node.children].sort(compare)) { rows.append(child.row); walk(child); } };
    walk(root);
    body.append(rows);
  };
  keys.forEach((cell, column) => {
    const key = cell.dataset.key;
    const first = key === "name" || key === "action" ? 1 : -1;
    cell.querySelector("button").addEventListener("click", () => {
      const now = { ascending: 1, descending: -1 }[cell.getAttribute("aria-sort")] || 0;
      const next = now === 0 ? first : now === first ? -first : 0;
      for (const other of keys) other.removeAttribute("aria-sort");
      if (next) cell.setAttribute("aria-sort", next > 0 ? "ascending" : "descending");
      sort(column, key, next);
    });
  });
  document.getElementById("unfold").addEventListener("click", () => { for (const node of nodes) node.open = true; render(); });
  document.getElementById("fold").addEventListener("click", () => foldTo(12));
  document.getElementById("find").addEventListener("input", (event) => { query = event.target.value.trim().toLowerCase(); render(); });
  foldTo(40);
})();
