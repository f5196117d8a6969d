"""The shell of a page that opens offline: its style, and a policy by which a browser loads nothing and runs nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from sfumato.config.characters import printable
from sfumato.tracking.charts import theme_css
from sfumato.tracking.report_answers import ANSWERS_CSS
from sfumato.tracking.report_curves import CURVES_CSS

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page's content security policy: a browser loads nothing, and runs no script but the one that we pass, whatever
text a run has logged."""


def render_page(name: str, sections: Sequence[str], script: str = "") -> str:
    """A whole page in one file that refers to nothing outside itself.

    Args:
        name: of what it shows, for the title.
        sections: HTML of the page's parts, in order.
        script: a constant of ours; the policy lets a browser run this text and no other.
    """
    policy = POLICY
    script_element = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"{POLICY}; script-src 'sha256-{digest}'"
        script_element = f"<script>{script}</script>"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · sfumato</title>\n<style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(sections)
        + f"\n</main>{script_element}</body></html>\n"
    )
    return printable(page)


CSS = (
    theme_css()
    + """
*{box-sizing:border-box}p{margin:0}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 20px 64px}small,.note,.brand,.gap{color:var(--muted);font-size:13px}
h1{font-size:30px;line-height:1.2;margin:0 0 10px;overflow-wrap:anywhere}h2,main>details>summary{font-size:19px;
margin:44px 0 10px}main>details>summary{font-weight:700}summary{cursor:pointer}
h3{font-size:14px;margin:22px 0 8px;color:var(--muted)}
.state{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center;color:var(--muted);font-size:14px}
.versions{margin-top:10px;font-size:12.5px}.versions b{font-weight:600;color:var(--ink)}
.badge{padding:2px 10px;border-radius:99px;border:1px solid var(--line);background:var(--card);color:var(--ink)}
.badge.done{color:var(--good);border-color:currentColor}progress{width:140px;height:8px;accent-color:var(--accent)}
.cards,.curves,.groups{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,325px),1fr))}
.groups{grid-template-columns:repeat(auto-fill,minmax(min(100%,270px),1fr));margin-top:10px}
.card,figure,.group,pre{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:14px 16px}.card .numbers{display:flex;flex-wrap:wrap;align-items:baseline;gap:0 10px;font-size:26px}
table,.card,figcaption,.chip{font-variant-numeric:tabular-nums}.first,.arrow{color:var(--muted)}
.change{font-size:15px;font-weight:600}.better{color:var(--good)}.worse,.warn{color:var(--bad)}
.timeline{margin:8px 0 12px}.timeline svg{min-width:760px}
figcaption{display:flex;flex-wrap:wrap;gap:0 10px;font-size:13px;margin-bottom:4px;overflow-wrap:anywhere}
figcaption span:last-child{margin-left:auto;color:var(--muted)}figure svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse}.grid{margin-top:8px}
.grid thead th{text-align:left;font-size:13px;color:var(--muted)}
.grid td{padding:0 10px 10px 0;vertical-align:top;width:var(--cell);min-width:var(--cell)}
.prompt th{text-align:left;font-weight:400;font-size:13.5px;padding:8px 0 4px;border-top:1px solid var(--line)}
.prompt span{position:sticky;left:0;display:inline-block;max-width:min(1100px,calc(100vw - 40px))}
img{display:block;width:100%;max-width:256px;height:auto;border-radius:5px;background:var(--line)}
.chip{display:inline-block;margin:4px 0;padding:0 7px;border-radius:5px;font-size:12.5px;
background:hsl(var(--hue) 62% 86%);color:hsl(var(--hue) 80% 20%)}
@media (prefers-color-scheme:dark){.chip{background:hsl(var(--hue) 42% 22%);color:hsl(var(--hue) 70% 80%)}}
.chip.none{background:var(--line);color:var(--muted)}.group p,.prompt span,.gap{overflow-wrap:anywhere}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font-size:13.5px}.grid.texts{table-layout:fixed;width:max-content}
details>.text{margin-top:6px;max-height:60vh;overflow:auto}
td summary,.group summary{font-size:13.5px;overflow-wrap:anywhere}.run{white-space:nowrap}.clear{font-weight:700}
.group p{margin-bottom:8px;font-size:13.5px}.pair{display:flex;gap:10px}.pair>div{flex:1;max-width:50%}
.pair>:only-child{max-width:100%}
.source{width:var(--cell,33%)}.pair>.source~div{max-width:33%}
audio{width:100%;max-width:256px;height:32px}.pixels{image-rendering:pixelated}.pair small:last-child{display:block}
pre{overflow-x:auto;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
table.numbers{font-size:13.5px;min-width:min(100%,520px)}.numbers th{color:var(--muted)}
.numbers td,.numbers th{padding:4px 24px 4px 0;text-align:right;border-bottom:1px solid var(--line)}
.numbers td:first-child,.numbers th:first-child{text-align:left}
@media (max-width:600px){main{padding:20px 14px 48px}.grid td{min-width:96px;width:96px;padding-right:8px}}
"""
    + ANSWERS_CSS
    + CURVES_CSS
)
