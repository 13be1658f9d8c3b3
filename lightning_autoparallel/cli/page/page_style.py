"""The style sheet of the page, for light and dark screens."""

STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #667085; --line: #dfe3ea;
  --compute: #4a78d6; --exposed: #e4572e; --idle: #e4572e1f; --k0: #2a9d8f; --k1: #8e6bbf; --k2: #c9952b; --k3: #5b8c3a;
  --k4: #b4577f; --base: #9aa7bd; --live: #4a78d6; --m0: #cfdcf7; --m1: #cdebe5; --m2: #f3e2bd; --m3: #e2d6f0; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161d; --card: #1b212b; --ink: #e5e9f0; --soft: #98a2b3;
  --line: #303846; --compute: #6f9bf0; --exposed: #ff7a50; --idle: #ff7a5026; --k0: #3dbdac; --k1: #b094dd;
  --k2: #e0b050; --k3: #86bb62; --k4: #d982a8; --base: #5d6a80; --live: #6f9bf0; --m0: #2f4673; --m1: #235249;
  --m2: #5e4a1c;  --m3: #493863; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 6px; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 18px 0 6px; }
td small { white-space: nowrap; }
small, .said { color: var(--soft); font-weight: normal; }
.said { margin: 4px 0 12px; }
section, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; }
section { margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin-top: 18px; }
@media (max-width: 1000px) { .cards { grid-template-columns: 1fr 1fr; } }
@media (max-width: 480px) { .cards { grid-template-columns: 1fr; } }
.card h3 { margin: 0; color: var(--soft); font-weight: 500; }
.card b { display: block; font-size: 27px; font-variant-numeric: tabular-nums; }
.card b small { font-size: 16px; }
.card p { margin: 6px 0 0; color: var(--soft); font-size: 13px; }
.bar, .stack { height: 8px; border-radius: 4px; background: var(--line); overflow: hidden;
  min-width: 120px; margin: 5px 0; }
.bar i { display: block; height: 100%; background: var(--compute); }
.stack { display: flex; }
.stack i { height: 100%; }
i.parameters { background: var(--compute); } i.gradients { background: var(--k0); }
i.optimizer { background: var(--k1); }
i.saved { background: var(--k2); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 10px; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td:first-child { min-width: 170px; }
tr.whole td { font-weight: 600; } tr.inside td:first-child { padding-left: 18px; } tr.faint td { color: var(--soft); }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; }
.chip { display: inline-block; font: 12px ui-monospace, monospace; background: var(--paper); border-radius: 5px;
  white-space: nowrap; border: 1px solid var(--line); padding: 0 5px; margin: 0 4px 2px 0; }
details { margin-top: 8px; font-size: 13px; } details p { margin: 10px 0 0; }
summary { cursor: pointer; color: var(--soft); }
ul { margin: 6px 0; padding-left: 20px; font-size: 13px; } li { overflow-wrap: anywhere; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin-bottom: 6px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.swatch.c { background: var(--compute); }
.swatch.k0 { background: linear-gradient(90deg, var(--k0) 50%, var(--k1) 50%); }
.swatch.x { background: var(--exposed); }
.swatch.base { background: var(--base); } .swatch.live { background: var(--live); }
svg rect.c { fill: var(--compute); } svg rect.x { fill: var(--exposed); } svg rect.idle { fill: var(--idle); }
svg rect.k0 { fill: var(--k0); } svg rect.k1 { fill: var(--k1); } svg rect.k2 { fill: var(--k2); }
svg rect.k3 { fill: var(--k3); } svg rect.k4 { fill: var(--k4); }
svg .live { fill: var(--live); fill-opacity: .75; } svg .base { fill: var(--base); }
svg .peak { stroke: var(--exposed); stroke-dasharray: 4 4; vector-effect: non-scaling-stroke; }
svg.mesh { max-width: none; } .mesh text { font: 10px system-ui, sans-serif; text-anchor: middle; fill: var(--ink); }
.m0 { fill: var(--m0); } .m1 { fill: var(--m1); } .m2 { fill: var(--m2); } .m3 { fill: var(--m3); }
.zoom > label { font-size: 13px; color: var(--soft); }
.zoom > input:checked ~ .panels .stretch { width: 500%; }
.axis.fine, .zoom > input:checked ~ .panels .axis.coarse { display: none; }
.zoom > input:checked ~ .panels .axis.fine { display: block; }
.lanes { display: grid; grid-template-columns: 110px minmax(0, 1fr); }
.labels div { height: 28px; line-height: 28px; font-size: 12px; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; padding-right: 8px; }
.scroll { overflow-x: auto; } .stretch { position: relative; width: 100%; }
.stretch svg { display: block; width: 100%; }
.axis { position: relative; height: 20px; border-top: 1px solid var(--line); font-size: 11px; color: var(--soft); }
.axis span { position: absolute; border-left: 1px solid var(--line); padding-left: 4px; white-space: nowrap; }
.curve { display: grid; grid-template-columns: 110px minmax(0, 1fr); margin: 12px 0; }
.curve svg { border-bottom: 1px solid var(--line); border-left: 1px solid var(--line); }
.heights { position: relative; font-size: 11px; color: var(--soft); }
.heights span { position: absolute; right: 8px; transform: translateY(-50%); white-space: nowrap; }
.curve em { position: absolute; left: 8px; transform: translateY(-100%); font-size: 12px; font-style: normal; }
.divider { position: absolute; top: 20px; height: 200px; border-left: 1px dashed var(--soft); }
.parts { display: flex; font-size: 12px; color: var(--soft); } .parts span { padding-left: 6px; min-width: 0; }
"""
