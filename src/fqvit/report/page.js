"use strict";
(() => {
  // Follow the theme of the system until the button is pressed.
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", dark() ? "Switch to light colours" : "Switch to dark colours"); };
  try { const kept = localStorage.getItem("fqvit-theme"); if (kept) root.dataset.theme = kept; } catch { /* browsers may deny storage to local files */ }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("fqvit-theme", root.dataset.theme); } catch { /* without storage, the choice lasts only for this visit */ }
    label();
  });
  system.addEventListener("change", label);
  label();

  // Highlight the link of the section in view in the navigation bar.
  const links = new Map([...document.querySelectorAll(".nav a")].map(a => [a.hash.slice(1), a]));
  const sections = [...links.keys()].map(id => document.getElementById(id));
  const mark = () => {
    const line = innerHeight * 0.3;
    let here = sections.filter(s => s.getBoundingClientRect().top <= line).pop() || sections[0];
    if (innerHeight + scrollY >= root.scrollHeight - 2) here = sections[sections.length - 1];
    for (const [id, a] of links) {
      if (id === here.id) {
        if (!a.hasAttribute("aria-current")) { a.setAttribute("aria-current", "true"); const list = a.closest("ul"); list.scrollLeft = a.offsetLeft - list.offsetLeft - 24; }
      } else a.removeAttribute("aria-current");
    }
  };
  let waiting = false;
  addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; mark(); }); } }, { passive: true });
  mark();

  // Mark figures and tables that continue to the right of what is visible, as on phones.
  const wide = [...document.querySelectorAll(".scroll")];
  const hint = part => part.toggleAttribute("data-more", part.scrollLeft + part.clientWidth < part.scrollWidth - 1);
  const sizes = new ResizeObserver(entries => entries.forEach(entry => hint(entry.target)));
  for (const part of wide) { part.addEventListener("scroll", () => hint(part), { passive: true }); sizes.observe(part); hint(part); }

  // Make every column header a sort button. Numbers sort by value; dashes come last in both directions.
  const value = text => { const number = Number(text.replace(/[,\s%+]/g, "").replaceAll("−", "-")); return text === "–" ? null : Number.isNaN(number) ? text.toLowerCase() : number; };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => {
      const press = document.createElement("button");
      press.type = "button";
      press.textContent = head.textContent;
      head.textContent = "";
      head.append(press);
      press.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row, i) => [value(row.cells[column].textContent.trim()), i, row]);
        rows.sort(([a, i], [b, j]) => {
          if (a === null || b === null) return (a === null) - (b === null) || i - j;
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
          return (down ? -order : order) || i - j;
        });
        body.append(...rows.map(row => row[2]));
      });
    });
  }

  // Filter the site table: a row stays visible if its site, role or codes contain each word of the filter.
  const filter = document.getElementById("filter"), count = document.getElementById("count");
  if (filter) {
    filter.closest(".tools").hidden = false;
    const rows = [...document.querySelectorAll("#site-table tbody tr")];
    const words = rows.map(row => [...row.cells].slice(1, 4).map(cell => cell.textContent).join(" ").toLowerCase());
    const apply = () => {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => { row.hidden = !wanted.every(word => words[i].includes(word)); shown += !row.hidden; });
      count.textContent = `${shown} of ${rows.length} sites`;
    };
    filter.addEventListener("input", apply);
    apply();
  }
})();
