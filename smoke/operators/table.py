"""What the audit's findings mean: the status of each cell, counts, and two tables compared.

Only the standard library is used, so that two tables can be compared anywhere.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoke.operators.census import base_name

SCHEMA = "tpuforge.operators/1"
CHANGES_SCHEMA = "tpuforge.operators-changes/1"
HERE = Path(__file__).resolve().parent

PASSES = "passes"
UNSUPPORTED = "unsupported"
DIFFERS = "differs"
LIMIT = "simulator limit"
ERROR = "error"
NOT_RUN = "not run"
STATUSES = (PASSES, UNSUPPORTED, DIFFERS, ERROR, LIMIT, NOT_RUN)

YES = "yes"
REFUSED = "refused"
NOTHING = "nothing to compile"
COMPILED = (YES, REFUSED, ERROR, NOT_RUN)
"""What may become of one program; of all programs of a cell, :data:`NOTHING` too."""

FORWARD = "forward"
WAYS = ("gradient", "out", "inplace")
"""The further ways of calling an operator; a cell has each under its name, if its entry does."""

_UNSUPPORTED = re.compile(
    r"^NotImplementedError: |is not implemented for TPU|not yet support"
    r"|expected the dtype of the input tensor to be neither"
)
"""How torch_tpu and PyTorch's dispatcher say that something has no TPU kernel."""

_OVERLOAD = re.compile(r"'aten::([\w.]+)'")


@dataclass(frozen=True)
class Listed:
    """A failure that is known beforehand.

    Attributes:
        reason: Why it fails, for people.
        match: What the message must contain, a regular expression.
        ops: OpInfo entries.
        dtypes: The dtypes it is known for; all if empty.
        way: How the operator is called: ``forward``, ``gradient``, ``out`` or ``inplace``.
    """

    reason: str
    match: str
    ops: frozenset[str]
    dtypes: frozenset[str]
    way: str = FORWARD

    def names(self, op: str, dtype: str, way: str = FORWARD) -> bool:
        """Whether it speaks of an operator with a dtype.

        Args:
            op: OpInfo entry.
            dtype: Such as ``float32``.
            way: How it is called.
        """
        return op in self.ops and way == self.way and (not self.dtypes or dtype in self.dtypes)


def read_listed(path: Path) -> list[Listed]:
    """Read a file of known failures.

    Args:
        path: TOML with tables ``[[listed]]`` of ``reason``, ``match``, ``ops``, ``dtypes`` and
            ``way``.

    Returns:
        Them.

    Raises:
        ValueError: If the file is no such file.
        OSError: If it cannot be read.
    """
    found = []
    for number, entry in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["listed"], 1):
        where = f"{path.name}, entry {number}"
        unknown = set(entry) - {"reason", "match", "ops", "dtypes", "way"}
        if unknown or not all(entry.get(key) for key in ("reason", "match", "ops")):
            raise ValueError(f"{where}: it has reason, match and ops, and may have dtypes and way")
        way = entry.get("way", FORWARD)
        if way not in (FORWARD, *WAYS):
            raise ValueError(f"{where}: there is no way {way}; there are {FORWARD}, {WAYS}")
        re.compile(entry["match"])
        ops, dtypes = frozenset(entry["ops"]), frozenset(entry.get("dtypes", ()))
        found.append(Listed(entry["reason"], entry["match"], ops, dtypes, way))
    return found


def limits() -> list[Listed]:
    """What fails only because of the simulator."""
    return read_listed(HERE / "limits.toml")


def known() -> list[Listed]:
    """Errors and differences of the torch_tpu that the project ships."""
    return read_listed(HERE / "known.toml")


def judge(
    called: tuple[str, str, str],
    finding: Mapping[str, Any],
    limits: Sequence[Listed],
    known: Sequence[Listed],
) -> dict[str, Any]:
    """One cell of the table, from what a worker found.

    Args:
        called: OpInfo entry, dtype and way.
        finding: ``kind`` and ``message`` of :class:`smoke.operators.crew.Ended`, and the worker's
            value, if there is one, under ``value``.
        limits: Known limits of the simulator.
        known: Known errors and differences of torch_tpu.

    Returns:
        ``status``, ``detail``, and what else is known.
    """
    value = finding.get("value") or {}
    message = str(value.get("message") or finding.get("message") or "")
    outcome = value.get("outcome")
    cell: dict[str, Any] = {"status": ERROR, "detail": message}
    if finding["kind"] == "killed":
        cell["status"] = NOT_RUN
    elif outcome == "same":
        cell["status"] = PASSES
    elif outcome == "no reference":
        cell["status"] = NOT_RUN
    else:
        limit = _listed(limits, called, message)
        if limit is not None:
            cell |= {"status": LIMIT, "detail": f"{limit.reason}\n{message}".strip()}
        elif outcome == "differs":
            cell["status"] = DIFFERS
        elif outcome == "raised" and _UNSUPPORTED.search(message):
            cell["status"] = UNSUPPORTED
            if named := _OVERLOAD.search(message):
                cell["missing"] = [named[1]]
        if cell["status"] in (ERROR, DIFFERS):
            one = _listed(known, called, message)
            if one is not None:
                cell["known"] = one.reason
    if cell["status"] == PASSES and not value.get("values", True):
        cell["detail"] = "shape and dtype only: the operator promises no values"
        cell["values"] = False
    if finding.get("again"):
        cell["detail"] = f"{cell['detail']}\nits process ended once before".strip()
        cell["again"] = True
    if value:
        cell["samples"] = value.get("samples", 0)
        cell["programs"] = list(value.get("programs", ()))
    cell["seconds"] = round(float(value.get("seconds") or finding.get("seconds") or 0.0), 3)
    return cell


def _listed(listed: Iterable[Listed], called: tuple[str, str, str], message: str) -> Listed | None:
    for one in listed:
        if one.names(*called) and re.search(one.match, message):
            return one
    return None


def stale(
    operators: Mapping[str, Mapping[str, Mapping[str, Any]]],
    limits: Sequence[Listed],
    known: Sequence[Listed],
    entries: Iterable[str],
) -> list[dict[str, str]]:
    """Known failures that are not true any more.

    Args:
        operators: Name to dtype to cell.
        limits: Known limits of the simulator.
        known: Known errors and differences.
        entries: All OpInfo entries of this PyTorch.

    Returns:
        ``op``, ``dtype``, ``file``, ``reason`` and what is found ``now``.
    """
    there, found = set(entries), []
    for file, listed in (("limits.toml", limits), ("known.toml", known)):
        for one in listed:
            for op in sorted(one.ops):
                if op not in there:
                    now = "PyTorch has no such entry"
                    found.append(_stale(op, "", file, one.reason, now))
                for dtype, way, cell in each(operators.get(op, {})):
                    if one.names(op, dtype, way) and cell["status"] == PASSES:
                        what = said(dtype, way)
                        found.append(_stale(op, what, file, one.reason, "it passes"))
    return found


def each(cells: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """An operator's cells, and within them those of its further ways.

    Args:
        cells: Dtype to cell.

    Yields:
        Dtype, way and cell.
    """
    for dtype, cell in cells.items():
        yield dtype, FORWARD, cell
        for way in WAYS:
            if way in cell:
                yield dtype, way, cell[way]


def said(dtype: str, way: str) -> str:
    """A dtype and a way, for people.

    Args:
        dtype: Such as ``float32``.
        way: How the operator is called.
    """
    return dtype if way == FORWARD else f"{dtype} {way}"


def _stale(op: str, dtype: str, file: str, reason: str, now: str) -> dict[str, str]:
    return {"op": op, "dtype": dtype, "file": file, "reason": reason, "now": now}


def join_compiles(
    cells: Iterable[dict[str, Any]],
    programs: Mapping[str, Mapping[str, Mapping[str, Any]]],
    targets: Sequence[str],
) -> None:
    """Tell each cell whether libtpu compiles all programs it was lowered to.

    Args:
        cells: Cells; those that name programs get ``compiles``.
        programs: Program to target to ``status`` and ``detail``.
        targets: Targets that were compiled for.
    """
    for cell in cells:
        if "programs" not in cell:
            continue
        cell["compiles"] = {}
        for target in targets:
            those = [programs.get(name, {}).get(target) for name in cell["programs"]]
            cell["compiles"][target] = _worst(those, cell["status"] == PASSES)


def _worst(those: Sequence[Mapping[str, Any] | None], whole: bool) -> dict[str, str]:
    if not those and not whole:
        return {"status": NOT_RUN, "detail": "it came to no program"}
    if not those:
        return {"status": NOTHING}
    for status in (REFUSED, ERROR, NOT_RUN):
        for one in those:
            if (one or {"status": NOT_RUN})["status"] == status:
                detail = (one or {}).get("detail")
                return {"status": status, **({"detail": str(detail)} if detail else {})}
    return {"status": YES} if whole else {"status": YES, "detail": "the programs it came to"}


def counts(
    operators: Mapping[str, Mapping[str, Mapping[str, Any]]],
    dtypes: Sequence[str],
    way: str = FORWARD,
) -> dict[str, dict[str, int]]:
    """Cells by dtype and status.

    Args:
        operators: Name to dtype to cell.
        dtypes: The columns.
        way: How the operators are called; those that cannot be called so are not counted.

    Returns:
        Dtype to status to number; every status is there.
    """
    made = {dtype: dict.fromkeys(STATUSES, 0) for dtype in dtypes}
    for cells in operators.values():
        for dtype, of, cell in each(cells):
            if of == way:
                made[dtype][cell["status"]] += 1
    return made


def compiled(
    programs: Mapping[str, Mapping[str, Mapping[str, Any]]], targets: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Programs by target and what libtpu said.

    Args:
        programs: Program to target to ``status``.
        targets: The targets.

    Returns:
        Target to status to number.
    """
    made = {target: dict.fromkeys(COMPILED, 0) for target in targets}
    for told in programs.values():
        for target in targets:
            made[target][told.get(target, {"status": NOT_RUN})["status"]] += 1
    return made


def exercised(called: Iterable[str], census: Mapping[str, Any]) -> dict[str, Any]:
    """How much of the backend the passing operators call, by operator.

    An overload like ``add.Tensor`` is composed of the direct kernel ``add.out``, so overloads
    themselves say little.

    Args:
        called: Overloads, without ``aten::``.
        census: The census.

    Returns:
        ``direct_operators`` (how many operators with a direct kernel are called), and ``missing``,
        those that are not.
    """
    reached = {base_name(name) for name in called}
    direct = {base_name(name) for name in census["direct"]}
    return {"direct_operators": len(direct & reached), "missing": sorted(direct - reached)}


def disagreements(
    operators: Mapping[str, Mapping[str, Mapping[str, Any]]], census: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Overloads that were unsupported when they were run, and that the census counts as served.

    Args:
        operators: Name to dtype to cell.
        census: The census.

    Returns:
        ``op``, ``dtype``, ``overload`` and what the ``census`` says.
    """
    served = {name: kind for kind in ("direct", "composite") for name in census[kind]}
    return [
        {"op": op, "dtype": dtype, "overload": f"aten::{name}", "census": served[name]}
        for op, cells in operators.items()
        for dtype, _, cell in each(cells)
        for name in cell.get("missing", ())
        if name in served
    ]


def problems(table: Mapping[str, Any]) -> list[dict[str, str]]:
    """What nobody knew: what makes the audit fail.

    Args:
        table: A ``tpuforge.operators/1`` document.

    Returns:
        ``op``, ``dtype``, ``what`` and ``detail``.
    """
    found = []
    for op, cells in table["operators"].items():
        for dtype, way, cell in each(cells):
            where = said(dtype, way)
            if cell["status"] in (ERROR, DIFFERS) and "known" not in cell:
                found.append(_problem(op, where, cell["status"], cell["detail"]))
            for target, one in cell.get("compiles", {}).items():
                if one["status"] in (REFUSED, ERROR):
                    what = f"libtpu for {target}: {one['status']}"
                    found.append(_problem(op, where, what, one.get("detail", "")))
    for one in table["stale"]:
        what = f"no longer true in {one['file']}"
        found.append(_problem(one["op"], one["dtype"], what, f"{one['now']}: {one['reason']}"))
    return found


def _problem(op: str, dtype: str, what: str, detail: str) -> dict[str, str]:
    return {"op": op, "dtype": dtype, "what": what, "detail": detail}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What the newer of two images gained and lost.

    A cell is lost when it passed and does not any more, whatever it does now, and gained the other
    way round. So is a program's compiling (``yes`` before, something else now), and a core or other
    ATen overload's support in the census. What only one of the tables was asked for is not
    compared, and named.

    Args:
        old: A ``tpuforge.operators/1`` document.
        new: Another one.

    Returns:
        A ``tpuforge.operators-changes/1`` document: ``lost``, ``gained``, ``changed`` (neither),
        each with ``what``, ``op``, ``dtype``, ``before``, ``now`` and ``detail``; and
        ``not_compared``, sentences.
    """
    made: dict[str, list[dict[str, str]]] = {"lost": [], "gained": [], "changed": []}
    silent: list[str] = []
    _compare_census(old["census"], new["census"], made)
    asked = [_asked(one) for one in (old, new)]
    for called in sorted(asked[0] ^ asked[1]):
        silent.append(f"{called}: only the {'older' if called in asked[0] else 'newer'} has it")
    partial = [one["settings"]["only"] for one in (old, new)]
    dtypes = [dtype for dtype in new["settings"]["dtypes"] if dtype in asked[0] & asked[1]]
    for name in dict.fromkeys([*old["operators"], *new["operators"]]):
        before, now = old["operators"].get(name), new["operators"].get(name)
        if (before is None and partial[0]) or (now is None and partial[1]):
            silent.append(f"{name}: only one of the tables was asked for it")
            continue
        for dtype in dtypes:
            _compare_cell(name, dtype, (before or {}).get(dtype), (now or {}).get(dtype), made)
    if old["settings"]["samples"] != new["settings"]["samples"]:
        silent.append("the numbers of samples differ: a change may come from that")
    targets = [set(one["settings"]["targets"]) for one in (old, new)]
    for target in sorted(targets[0] ^ targets[1]):
        silent.append(f"{target}: only one of the tables was compiled for it")
    return {
        "schema": CHANGES_SCHEMA,
        "old": _who(old),
        "new": _who(new),
        **made,
        "not_compared": silent,
        "exit_code": 1 if made["lost"] else 0,
    }


def _who(table: Mapping[str, Any]) -> dict[str, Any]:
    facts = table.get("image") or {}
    return {
        "started": table["started"],
        "versions": table["versions"],
        "lock_sha256": facts.get("lock_sha256"),
    }


def _asked(table: Mapping[str, Any]) -> set[str]:
    """The dtypes that a table was asked for, and each with its further ways."""
    if not table["audited"]:
        return set()
    settings = table["settings"]
    further = (said(dtype, way) for dtype in settings["ways_dtypes"] for way in settings["ways"])
    return {*settings["dtypes"], *further}


def _change(
    what: str, op: str, dtype: str, pair: tuple[str, str], detail: object = ""
) -> dict[str, str]:
    words = {"before": pair[0], "now": pair[1], "detail": str(detail or "").partition("\n")[0]}
    return {"what": what, "op": op, "dtype": dtype, **words}


def _compare_cell(
    op: str,
    dtype: str,
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any] | None,
    made: dict[str, list[dict[str, str]]],
) -> None:
    absent: Mapping[str, Any] = {"status": "no such entry", "detail": ""}
    first, second = before or absent, now or absent
    words = (first["status"], second["status"])
    if words[0] != words[1]:
        kind = "lost" if words[0] == PASSES else "gained" if words[1] == PASSES else "changed"
        made[kind].append(_change("runs", op, dtype, words, second.get("detail")))
    for way in WAYS:
        if way in first and way in second:
            _compare_cell(op, said(dtype, way), first[way], second[way], made)
    then, there = first.get("compiles", {}), second.get("compiles", {})
    for target in sorted(then.keys() & there.keys()):
        pair = (then[target]["status"], there[target]["status"])
        if pair[0] == pair[1]:
            continue
        bad = (REFUSED, ERROR)
        kind = "lost" if pair[1] in bad else "gained" if pair[0] in bad else "changed"
        what = f"compiles for {target}"
        made[kind].append(_change(what, op, dtype, pair, there[target].get("detail")))


def _compare_census(
    old: Mapping[str, Any], new: Mapping[str, Any], made: dict[str, list[dict[str, str]]]
) -> None:
    kinds = ("direct", "composite", "unsupported")
    before, now = ({n: kind for kind in kinds for n in census[kind]} for census in (old, new))
    for name in sorted(before.keys() | now.keys()):
        pair = (before.get(name, "no such overload"), now.get(name, "no such overload"))
        if pair[0] == pair[1]:
            continue
        served = [word in ("direct", "composite") for word in pair]
        kind = "lost" if served == [True, False] else "gained" if served[1] else "changed"
        kind = "changed" if served == [True, True] else kind
        made[kind].append(_change("census", f"aten::{name}", "", pair))
