"use strict";
(function () {
  // Headings become buttons only where there is a script to answer them.
  function sortBy(table, column, heading) {
    var now = heading.getAttribute("aria-sort");
    var order = heading.dataset.first || "descending";
    if (now) { order = now === "descending" ? "ascending" : "descending"; }
    var sign = order === "ascending" ? 1 : -1;
    var body = table.tBodies[0];
    var rows = Array.from(body.rows);
    function key(row) {
      var cell = row.cells[column];
      if (column === 0) { return cell.dataset.value; }
      return cell.dataset.value === "" ? null : Number(cell.dataset.value.replace("inf", "Infinity"));
    }
    rows.sort(function (a, b) {
      var x = key(a), y = key(b);
      if (x === null || y === null) { return (x === null) - (y === null); }
      if (column === 0) { return sign * x.localeCompare(y, "en", { numeric: true }); }
      return sign * (x - y);
    });
    body.append.apply(body, rows);
    table.querySelectorAll("thead th").forEach(function (th) { th.removeAttribute("aria-sort"); });
    heading.setAttribute("aria-sort", order);
  }

  document.querySelectorAll("table.sortable").forEach(function (table) {
    Array.from(table.tHead.rows[0].cells).forEach(function (heading, column) {
      var button = document.createElement("button");
      button.type = "button";
      button.append.apply(button, Array.from(heading.childNodes));
      button.addEventListener("click", function () { sortBy(table, column, heading); });
      heading.append(button);
    });
  });
})();
