// Draws the charts of a report in the places that its HTML has for them.
const report = JSON.parse(document.getElementById("data").textContent);
ShardwiseCharts.verdict(document.getElementById("verdict-bar"), report.verdict);
for (const place of document.querySelectorAll("[data-chart]")) {
  ShardwiseCharts.draw(place, report.charts[place.dataset.chart]);
}
