"""The table of operators as one self-contained page, in the dress of the health report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoke import page
from smoke.operators import table
from smoke.page import Html, tag

_MARKS = {
    table.PASSES: "passed",
    table.UNSUPPORTED: "warning",
    table.DIFFERS: "failed",
    table.ERROR: "failed",
    table.LIMIT: "not run",
    table.NOT_RUN: "not run",
}
_WAYS = {"gradient": "gradients", "out": "out=", "inplace": "in place"}
_DETAIL = 600


def render(found: Mapping[str, Any]) -> str:
    """The page.

    Args:
        found: A ``tpuforge.operators/1`` document.

    Returns:
        An HTML document.
    """
    sections = [("summary", "Summary", _summary(found)), ("census", "Census", _census(found))]
    if found["audited"]:
        sections.insert(1, ("operators", "Operators", _operators(found)))
    bar, parts = page.outline(sections)
    body = tag(
        "body",
        tag("header", bar),
        tag("main", tag("h1", "Operators on a TPU"), parts),
        tag("footer", tag("p", _foot(found))),
        tag("script", Html(_SCRIPT)),
    )
    return page.document("Operators on a TPU", body, style=_STYLE)


def _summary(found: Mapping[str, Any]) -> Html:
    facts = found["image"] or {}
    named = [(name.replace("_", " "), str(version)) for name, version in found["versions"].items()]
    pairs = [("image", str(facts.get("image", "none"))), *named]
    rows = [tag("div", tag("dt", key), tag("dd", tag("code", value))) for key, value in pairs]
    parts = [tag("dl", rows, class_="pairs")]
    if not found["audited"]:
        parts.append(tag("p", f"The audit was not run: {found['why_not']}.", class_="reason"))
        return page.join(parts)
    parts.append(_counts("dtype", table.STATUSES, found["counts"]))
    parts += [
        _counts(_WAYS[way], table.STATUSES, counts)
        for way, counts in found["counts_of_ways"].items()
    ]
    if found["compiled"]:
        parts.append(_counts("programs compiled for", table.COMPILED, found["compiled"]))
    parts.append(tag("h3", "What nobody knew"))
    if found["problems"]:
        items = [
            tag("li", tag("b", f"{one['op']} {one['dtype']}"), f" {one['what']}: ", one["detail"])
            for one in found["problems"]
        ]
        parts.append(tag("ul", items, class_="problems"))
    else:
        parts.append(tag("p", "Nothing."))
    return page.join(parts)


def _counts(title: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, int]]) -> Html:
    """Numbers by dtype or target, and status."""
    head = tag("tr", tag("th", title), [tag("th", one, class_="n") for one in columns])
    body = [
        tag(
            "tr",
            tag("th", tag("code", name), scope="row"),
            [tag("td", str(counts[one]), class_="n") for one in columns],
        )
        for name, counts in rows.items()
    ]
    return tag("table", tag("thead", head), tag("tbody", body), class_="counts")


def _operators(found: Mapping[str, Any]) -> Html:
    dtypes, targets = found["settings"]["dtypes"], found["settings"]["targets"]
    shown = [
        status
        for status in table.STATUSES
        if any(counts[status] for counts in found["counts"].values())
    ]
    status = page.choice("status", "status in any column, however called", shown)
    tools = page.search("name, message", [status], f"{len(found['operators'])} operators")
    head = tag("tr", tag("th", "operator"), [tag("th", tag("code", dtype)) for dtype in dtypes])
    rows = [_row(op, cells, dtypes, targets) for op, cells in found["operators"].items()]
    whole = tag("table", tag("thead", head), tag("tbody", rows), class_="ops")
    region = {"tabindex": 0, "role": "region", "aria_label": "Operators"}
    return page.join([tools, tag("div", whole, class_="scroll", **region)])


def _row(op: str, cells: Mapping[str, Any], dtypes: list[str], targets: list[str]) -> Html:
    columns = [_cell(cells[dtype], targets) for dtype in dtypes]
    details = {cells[dtype]["detail"] for dtype in dtypes}
    return tag(
        "tr",
        tag("th", tag("code", op), scope="row"),
        columns,
        class_="op",
        data_status="|".join(sorted({one["status"] for _, _, one in table.each(cells)})),
        data_words=" ".join([op, *sorted(details)]).lower()[:_DETAIL],
    )


def _cell(cell: Mapping[str, Any], targets: list[str]) -> Html:
    status = cell["status"]
    said = _said(cell, targets)
    for way in table.WAYS:
        if way in cell:
            words = " ".join([cell[way]["status"], *_said(cell[way], targets)])
            said.append(f"{_WAYS[way]}: {words}")
    shown = page.mark(_MARKS[status], status)
    more = [tag("b", " refused by libtpu")] if _refused(cell) else []
    for way in table.WAYS:
        # what was not run because the operator itself does not pass needs no mark of its own
        if way in cell and cell[way]["status"] not in (table.PASSES, table.NOT_RUN):
            more.append(tag("i", f" {_WAYS[way]}: {cell[way]['status']}"))
    if not said:
        return tag("td", shown)
    return tag("td", tag("details", tag("summary", shown, more), tag("pre", "\n".join(said))))


def _said(cell: Mapping[str, Any], targets: list[str]) -> list[str]:
    """What is known of one call, beside its status."""
    said = [cell["detail"][:_DETAIL]] if cell["detail"] else []
    if cell.get("known"):
        said.insert(0, f"known: {cell['known']}")
    for target in targets:
        one = cell.get("compiles", {}).get(target)
        if one and one["status"] != table.NOTHING:
            said.append(f"compiles for {target}: {one['status']} {one.get('detail', '')}".strip())
    return said


def _refused(cell: Mapping[str, Any]) -> bool:
    return any(one["status"] == table.REFUSED for one in cell.get("compiles", {}).values())


def _census(found: Mapping[str, Any]) -> Html:
    taken = found["census"]
    core = taken["core"]
    line = (
        f"{taken['overloads']} overloads of ATen. Core ATen: "
        f"{core['overloads'] - len(core['missing'])} of {core['overloads']}."
    )
    lists = [
        tag(
            "details",
            tag("summary", f"{taken['counts'][kind]} {kind}: {why}"),
            tag("p", tag("code", ", ".join(taken[kind])), class_="names"),
        )
        for kind, why in (
            ("direct", "a kernel of torch_tpu's own"),
            ("composite", "PyTorch composes it of others"),
            ("unsupported", "no kernel"),
        )
    ]
    return page.join([tag("p", line), lists])


def _foot(found: Mapping[str, Any]) -> str:
    host = found["host"]
    text = f"Made {found['started']} on {host['cores']} cores of {host['machine']}"
    if found["audited"]:
        text += f" in {page.seconds(found['seconds']['all'])}"
        text += f", largest process {page.size(found['peak_memory_bytes'])}"
    return text + "."


_STYLE = """
.ops td{vertical-align:top;white-space:nowrap}.ops th{text-align:left;font-weight:400}
.ops summary{cursor:pointer;list-style:none}.ops summary b{color:var(--bad)}
.ops pre{white-space:pre-wrap;overflow-wrap:anywhere;max-width:34rem;font-size:.82rem;
background:var(--code);padding:.5rem;border-radius:.4rem}
.ops summary::after{content:" \\25b8";color:var(--soft)}
.counts{margin:.8rem 0}.counts th{text-align:left}.counts th.n{text-align:right}
.problems li{overflow-wrap:anywhere;margin:.3rem 0}.names{overflow-wrap:anywhere;font-size:.85rem}
"""

_SCRIPT = """
(function(){
var form=document.getElementById('tools');if(!form)return;form.hidden=false;
var rows=[].slice.call(document.querySelectorAll('.op'));
var apply=function(){
var words=document.getElementById('search').value.toLowerCase().split(/\\s+/).filter(Boolean);
var one=form.querySelector('[name=status]:checked'),status=one?one.value:'',count=0;
rows.forEach(function(row){
var data=row.dataset,hit=(!status||data.status.split('|').indexOf(status)>=0)&&
words.every(function(word){return data.words.indexOf(word)>=0});
row.hidden=!hit;if(hit)count++});
document.getElementById('shown').textContent=count+' of '+rows.length+' operators'};
form.addEventListener('input',apply);
form.addEventListener('submit',function(event){event.preventDefault()})})();
"""
