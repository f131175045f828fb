// above each long table, a box that keeps the rows with all the words in it
for (const table of document.querySelectorAll("article table")) {
  const rows = table.tBodies[0].rows;
  if (rows.length < 100) continue;
  const box = document.createElement("input");
  Object.assign(box, { type: "search", placeholder: "Filter the rows", className: "filter" });
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  table.before(box);
}
