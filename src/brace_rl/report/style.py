"""The page's style sheet: one column on a phone, light or dark as the reader's system asks."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #ffffff; --ink: #1d2129; --soft: #5d6673; --rule: #e1e4e8; --tool: #fff1d6;
  --good: #1a7f4b; --bad: #b3261e; --warn: #fff6e0; --warn-edge: #d99a00;
  --p1: #0b66c3; --p2: #d1570b; --p3: #138a62; --p4: #9a3fb5; --p5: #b58500; --p6: #2aa5c7; --p7: #c2315f;
  --p8: #77808c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --card: #1b1f26; --ink: #e4e7ec; --soft: #9aa4b2; --rule: #323843; --tool: #40351c;
    --good: #5fd39b; --bad: #ff8a80; --warn: #33290f; --warn-edge: #d9a520;
    --p1: #66aef5; --p2: #ff9a57; --p3: #4cc79a; --p4: #cf8be6; --p5: #e3bd4d; --p6: #6fd0ea; --p7: #f27da0;
    --p8: #a3acb8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 20px 16px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.5rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 34px 0 10px; }
h3 { font-size: .95rem; margin: 0; }
.whole { display: inline-block; }
.step { margin: 14px 0 6px; }
p { margin: .3em 0; }
.soft, figcaption p { color: var(--soft); font-size: .85rem; }
.head {
  display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr));
  margin-top: 14px;
}
.card, figure, .table {
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px;
}
.big { font-size: 2rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.big small { font-size: .9rem; font-weight: 400; color: var(--soft); white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.notes {
  margin: 18px 0 0; padding: 10px 14px 10px 32px; background: var(--warn);
  border-left: 4px solid var(--warn-edge); border-radius: 4px;
}
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
.key { margin-right: 12px; font-size: .85rem; white-space: nowrap; }
.key i {
  display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 5px;
  vertical-align: middle; background: var(--c);
}
.key b { font-weight: 600; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; margin-top: 6px; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); fill: none; }
.ref { stroke: var(--soft); stroke-dasharray: 4 4; fill: none; }
.line, .whisker { stroke: var(--c); stroke-width: 1.8; fill: none; stroke-linejoin: round; }
.faint { stroke: var(--c); stroke-width: 1; fill: none; opacity: .28; }
.area { fill: var(--c); opacity: .85; }
circle { fill: var(--c); }
.c1 { --c: var(--p1); } .c2 { --c: var(--p2); } .c3 { --c: var(--p3); } .c4 { --c: var(--p4); }
.c5 { --c: var(--p5); } .c6 { --c: var(--p6); } .c7 { --c: var(--p7); } .c8 { --c: var(--p8); }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: 3px 14px 3px 0; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.sample { margin-bottom: 12px; }
.sample header { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .85rem; }
pre {
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 8px 0 0;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; unicode-bidi: isolate;
}
.prompt { color: var(--soft); }
.tool { background: var(--tool); border-radius: 3px; }
summary { cursor: pointer; }
"""
