"use strict";
const root = document.documentElement;
const button = document.getElementById("theme");
function paint(theme) {
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "Light" : "Dark";
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
paint(dark.matches ? "dark" : "light");
dark.addEventListener("change", (event) => paint(event.matches ? "dark" : "light"));
button.addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));

function valueOf(row, column) {
  const cell = row.cells[column];
  if (!("value" in cell.dataset)) return cell.textContent;
  return cell.dataset.value === "" ? null : Number(cell.dataset.value);
}
function compare(one, other) {
  if (one === null || other === null) return (one === null) - (other === null);
  return typeof one === "number" ? one - other : one.localeCompare(other);
}
for (const table of document.querySelectorAll("table:not([data-tree])")) {
  const heads = [...table.tHead.rows[0].cells];
  for (const [column, head] of heads.entries()) {
    head.querySelector("button").addEventListener("click", () => {
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, column), row]);
      rows.sort(([one], [other]) => {
        const unknown = one === null || other === null;
        return (unknown ? 1 : sign) * compare(one, other);
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  }
}
