// Tables that sort by a column when its head is pressed.

function startTables() {
  document.querySelectorAll("table.data").forEach((table) => {
    table.querySelectorAll("th").forEach((head, column) => {
      const button = element("button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => sortBy(table, head, column));
    });
  });
}

function sortBy(table, head, column) {
  const words = head.classList.contains("words");
  const before = head.getAttribute("aria-sort");
  // Numbers are sorted from the greatest first.
  const direction = before === null ? (words ? "ascending" : "descending") : before === "ascending" ? "descending" : "ascending";
  const sign = direction === "ascending" ? 1 : -1;
  table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", direction);
  const rows = [...table.tBodies[0].rows];
  const valueOf = (row) => row.cells[column].dataset.value;
  rows.sort((a, b) => {
    const [one, other] = [valueOf(a), valueOf(b)];
    if (one === undefined || other === undefined) {
      if (one !== other) return one === undefined ? 1 : -1; // unknown values come last
      return sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true });
    }
    return sign * (Number(one) - Number(other));
  });
  table.tBodies[0].append(...rows);
}
