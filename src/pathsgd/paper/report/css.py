"""How the report looks: on a screen of any width, light or dark, and on paper."""

CSS = """
:root {
  color-scheme: light dark;
  --text: #1b1b1d; --soft: #5c5f66; --line: #d9dade; --ground: #ffffff; --raised: #f5f5f7;
  --good: #1a6b3c; --good-ground: #e3f3e8; --bad: #9c1c1c; --bad-ground: #fae6e4;
  --open: #5a5a5a; --open-ground: #ebebed; --chosen: #fff1bf;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e7e7ea; --soft: #a3a6ae; --line: #3a3c42; --ground: #17181b; --raised: #212328;
    --good: #8bd6a6; --good-ground: #173323; --bad: #f2a19a; --bad-ground: #40201e;
    --open: #b9bbc1; --open-ground: #2e3036; --chosen: #4a3f14;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; padding: 2rem 1.1rem 4rem; background: var(--ground); color: var(--text);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 64rem; margin: 0 auto; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .8rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p, li { max-width: 44rem; }
.lede { font-size: 1.08rem; color: var(--soft); margin: 0 0 1rem; }
nav { font-size: .92rem; margin-top: 1rem; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
nav a { color: inherit; }
.badge {
  display: inline-block; font-size: .8rem; font-weight: 600; line-height: 1.5; padding: 0 .55em;
  border-radius: .7em; white-space: nowrap; border: 1px solid currentColor;
}
.held { color: var(--good); background: var(--good-ground); }
.not-held { color: var(--bad); background: var(--bad-ground); }
.not-tested { color: var(--open); background: var(--open-ground); }
ol.claims { list-style: none; margin: 0; padding: 0; }
ol.claims > li {
  display: grid; grid-template-columns: 2rem 1fr; gap: 0 .4rem; max-width: none; padding: .9rem 0;
  border-bottom: 1px solid var(--line);
}
.claim-number { color: var(--soft); font-variant-numeric: tabular-nums; }
.claim-text { margin: 0 0 .25rem; }
.claim-text .badge { margin-left: .3em; }
.evidence { margin: .2rem 0 0; padding-left: 1.1rem; font-size: .9rem; color: var(--soft); }
.evidence li { margin: .1rem 0; overflow-wrap: anywhere; }
.evidence .against { color: var(--bad); }
figure { margin: 1.4rem 0 2rem; }
figure img {
  display: block; width: 100%; height: auto; background: #fff; padding: .6rem; border: 1px solid var(--line);
  border-radius: .35rem;
}
figure:not(.table) figcaption { font-size: .9rem; color: var(--soft); margin-top: .6rem; max-width: 50rem; }
.table figcaption { font-weight: 600; margin-bottom: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td {
  text-align: left; vertical-align: top; padding: .32rem .8rem .32rem 0; border-bottom: 1px solid var(--line);
}
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; vertical-align: bottom; }
tbody th { font-weight: 500; }
.number { text-align: right; }
.search td { white-space: nowrap; }
.small { display: block; font-size: .78rem; color: var(--soft); }
.chosen { background: var(--chosen); color: inherit; padding: 0 .25em; font-weight: 600; }
.note { font-size: .85rem; color: var(--soft); margin: .5rem 0 0; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { margin-top: 3rem; font-size: .85rem; color: var(--soft); }
@media (max-width: 40rem) {
  body { padding: 1.2rem .9rem 3rem; }
  h1 { font-size: 1.5rem; }
  figure:not(.table) .wide { overflow-x: auto; }
  figure:not(.table) .wide img { width: 52rem; max-width: none; }
}
@media print {
  :root {
    --text: #000; --soft: #444; --line: #bbb; --ground: #fff; --raised: #fff; --good: #000; --bad: #000;
    --open: #000; --good-ground: #fff; --bad-ground: #fff; --open-ground: #fff; --chosen: #eee;
  }
  html { font-size: 10pt; }
  body { padding: 0; }
  nav { display: none; }
  .scroll, figure:not(.table) .wide { overflow: visible; }
  figure:not(.table) .wide img { width: 100%; }
  h2 { break-after: avoid; }
  figure:not(.table), tr, ol.claims > li { break-inside: avoid; }
  table { font-size: 8pt; }
}
"""
