"use strict";
// Sorting, filtering, one shape at a time, and what a mark stands for. Without this script the page shows all.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

for (const table of all("table[data-sortable]")) {
  const body = table.tBodies[0];
  for (const head of all("thead th[data-sort]", table)) {
    const button = document.createElement("button");
    button.type = "button";
    button.ariaLabel = head.textContent;
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending" ||
        (head.dataset.sort === "text" && head.getAttribute("aria-sort") !== "ascending");
      for (const other of all("th[aria-sort]", table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
      const order = head.dataset.sort === "text"
        ? (a, b) => key(a).localeCompare(key(b), "en", {numeric: true})
        : (a, b) => key(a) - key(b);
      body.append(...all("tr", body).sort((a, b) => up ? order(a, b) : order(b, a)));
    });
  }
}

for (const form of all("form[data-filters]")) {
  const rows = all("tbody tr", document.getElementById(form.dataset.filters));
  const output = form.querySelector("output");
  const apply = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = all("select", form).filter(select => select.value);
    let shown = 0;
    for (const row of rows) {
      const text = row.dataset.text;
      const fits = words.every(word => text.includes(word)) &&
        chosen.every(select => row.dataset[select.name] === select.value);
      row.hidden = !fits;
      shown += fits;
      for (const mark of all(`[data-row="${row.dataset.row}"]`)) mark.style.display = fits ? "" : "none";
    }
    output.value = `${shown} of ${rows.length} shown`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = false;
  apply();
}

const chooser = document.getElementById("choose-shape");
if (chooser) {
  const shapes = all(".shape");
  const choose = () => { for (const shape of shapes) shape.hidden = chooser.value !== "" && shape.id !== chooser.value; };
  const follow = () => {
    const target = shapes.find(shape => `#${shape.id}` === location.hash);
    if (target) { chooser.value = target.id; choose(); target.scrollIntoView(); }
  };
  chooser.addEventListener("change", choose);
  chooser.form.hidden = false;
  chooser.value = shapes[0].id;
  choose();
  addEventListener("hashchange", follow);
  follow();
}

const tip = Object.assign(document.createElement("div"), {id: "tip", hidden: true});
tip.setAttribute("role", "status");
document.body.append(tip);
const tell = mark => {
  tip.textContent = mark.dataset.tip;
  tip.hidden = false;
  const at = mark.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left + at.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 10;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above > 4 ? above : at.bottom + 10) + scrollY}px`;
  hot(mark, true);
};
const hot = (mark, on) => {
  if (mark.dataset.row === undefined) return;
  for (const other of all(`[data-row="${mark.dataset.row}"]`)) other.classList.toggle("hot", on);
};
const hush = mark => { tip.hidden = true; hot(mark, false); };
for (const mark of all("[data-tip]")) {
  mark.addEventListener("mouseenter", () => tell(mark));
  mark.addEventListener("mouseleave", () => hush(mark));
  mark.addEventListener("focus", () => tell(mark));
  mark.addEventListener("blur", () => hush(mark));
}
addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });
// One stop of the Tab key per figure; arrows go from mark to mark.
for (const figure of all("[data-marks]")) {
  const marks = all("[data-tip]", figure);
  marks.forEach((mark, place) => {
    mark.setAttribute("tabindex", place ? "-1" : "0");
    mark.addEventListener("keydown", event => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      const shown = marks.filter(other => other.style.display !== "none");
      const next = shown[(shown.indexOf(mark) + step + shown.length) % shown.length];
      for (const other of marks) other.setAttribute("tabindex", other === next ? "0" : "-1");
      next.focus();
    });
  });
}

// What is wider than the screen says so, until its end is seen.
for (const box of all(".scroll")) {
  const hint = Object.assign(document.createElement("p"), {className: "hint", textContent: "Wider than the screen: scroll sideways \u2192"});
  hint.setAttribute("aria-hidden", "true");
  box.after(hint);
  const look = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 4);
  box.addEventListener("scroll", look, {passive: true});
  new ResizeObserver(look).observe(box);
}
