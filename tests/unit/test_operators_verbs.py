"""The command ``health operators`` and the verb ``operators``: exit codes, files, comparisons."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from smoke.operators import page, run, table

from process_support import call
from smoke_host_support import DIGEST, calls, fake_engine, fill, forge
from tpuforge.paths import sha256_file
from tpuforge.smoke import simulator

CLI = Path(__file__).resolve().parents[2] / "smoke" / "cli.py"


EACH = """
import contextlib, io, json, sys
from smoke import cli
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = cli.main(["health", "operators", *words])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def operators(*lines: Sequence[str | Path]) -> list[tuple[int, str, str]]:
    """Run the suite's command with each of these lines, all in one process apart.

    Returns:
        Exit code, standard output and standard error of each.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("TPU")}
    words = json.dumps([list(map(str, line)) for line in lines])
    root = CLI.parents[1]
    done = call([sys.executable, "-c", EACH, words], cwd=root, env=env, timeout=60, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def document(exit_code: int = 0) -> dict[str, Any]:
    """A whole table of three operators."""
    cells: dict[str, dict[str, Any]] = {
        "add": {
            "status": "passes",
            "detail": "",
            "samples": 1,
            "programs": ["aa"],
            "gradient": {"status": "differs", "detail": "by 7", "known": "odd", "programs": []},
            "out": {"status": "not run", "detail": "its forward does not pass"},
        },
        "eig": {"status": "unsupported", "detail": "aten::eig <is not> there", "programs": []},
        "pad": {"status": "error", "detail": "exceeds", "known": "a defect", "programs": []},
    }
    made: dict[str, Any] = {
        "schema": table.SCHEMA,
        "image": {"image": "runtime", "lock_sha256": "ab"},
        "versions": {"torch": "2.13.0", "torch_tpu": "0.2.0", "libtpu": None},
        "started": "2026-11-30T12:00:00+00:00",
        "host": {"cores": 2, "machine": "x86_64"},
        "settings": {
            "dtypes": ["float32"],
            "ways": ["gradient", "out", "inplace"],
            "ways_dtypes": ["float32"],
            "samples": 1,
            "only": None,
            "targets": ["v6e:2x2"],
            "jobs": 2,
            "tolerances": {"float32": [1e-4, 1e-4]},
        },
        "census": {
            "seconds": 0.1,
            "overloads": 3,
            "counts": {"direct": 1, "composite": 1, "unsupported": 1},
            "direct_operators": 1,
            "core": {"overloads": 1, "missing": []},
            "direct": ["add.Tensor"],
            "composite": ["flatten"],
            "unsupported": ["eig"],
        },
        "audited": True,
        "why_not": None,
        "entries": 3,
        "operators": {op: {"float32": cell} for op, cell in cells.items()},
        "programs": {"aa": {"v6e:2x2": {"status": "yes", "seconds": 0.1, "code_bytes": 60000}}},
        "stale": [],
        "seconds": {"survey": 1.0, "audit": 2.0, "compile": 3.0, "all": 6.0},
        "cpu_seconds": 9.0,
        "restarts": 0,
        "peak_memory_bytes": 600_000_000,
        "exit_code": exit_code,
    }
    table.join_compiles(cells.values(), made["programs"], ["v6e:2x2"])
    made["counts"] = table.counts(made["operators"], ["float32"])
    made["counts_of_ways"] = {
        way: table.counts(made["operators"], ["float32"], way) for way in table.WAYS
    }
    made["compiled"] = table.compiled(made["programs"], ["v6e:2x2"])
    made["exercised"] = table.exercised(["add.Tensor"], made["census"])
    made["disagreements"] = table.disagreements(made["operators"], made["census"])
    made["problems"] = table.problems(made)
    return made


def lost() -> dict[str, Any]:
    """The same, in which something that passed does not any more."""
    made = deepcopy(document())
    made["operators"]["add"]["float32"] |= {"status": "differs", "detail": "off by one"}
    return made


def put(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_what_makes_no_sense_or_has_no_torch_is_not_judged() -> None:
    cases = {
        ("--dtype", "float33x"): "no dtype",
        ("--dtype", ","): "names none",
        ("--target", "v6e"): "not a topology",
        ("--samples", "0"): "1 or more",
        ("--ways", "gradient,sideways"): "'sideways' is no way",
        ("--jobs", "0"): "1 or more",
        ("--only", "("): "no regular expression",
        ("--compare", "a.json", "b.json"): "cannot be read",
        ("--census",): "the operators cannot be listed: ModuleNotFoundError",
    }
    for (code, _, told), said in zip(operators(*cases), cases.values(), strict=True):
        assert code == 2, said
        assert said in told


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "no simulator is mounted"),
        ({"TPUFORGE_SIMULATOR": "/nowhere"}, "holds no simulator"),
    ],
)
def test_why_no_operator_can_be_run(variables: dict[str, str], why: str) -> None:
    assert why in str(run._closed(variables))


def test_a_real_plugin_is_never_taken_for_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "simulator.json").touch()
    variables = {"TPUFORGE_SIMULATOR": str(tmp_path), "TPU_LIBRARY_PATH": "/lib/libtpu.so"}
    assert run._closed(variables) == "TPU_LIBRARY_PATH does not name the simulator's plugin"
    assert run._closed(variables | {"TPU_LIBRARY_PATH": f"{tmp_path}/wrapper.so"}) is None


def test_without_a_simulator_there_is_the_census_and_no_verdict() -> None:
    shown = io.StringIO()
    why = str(run._closed({}))
    run.print_table(document() | {"audited": False, "why_not": why}, shown)
    assert shown.getvalue().splitlines() == [
        "census: 3 ATen overloads: 1 direct (1 operators), 1 composite, 1 unsupported; core ATen 1 "
        "of 1",
        "audit: not run: no simulator is mounted",
    ]


def test_exit_codes_of_an_audit() -> None:
    found = document()
    assert found["problems"] == []
    assert run._exit_code(found, census_only=False) == 0
    found["problems"] = [{}]
    assert run._exit_code(found, census_only=False) == 1
    assert run._exit_code({"audited": False}, census_only=False) == 2
    assert run._exit_code({"audited": False}, census_only=True) == 0
    nothing = {
        "audited": True,
        "problems": [],
        "counts": {"int64": dict.fromkeys(table.STATUSES, 0) | {table.NOT_RUN: 5}},
    }
    assert run._exit_code(nothing, census_only=False) == 2


def test_two_tables_are_compared(tmp_path: Path) -> None:
    old, new = put(tmp_path / "old.json", document()), put(tmp_path / "new.json", lost())
    same, worse, better = operators(
        ("--compare", old, old),
        ("--compare", old, new, "--json", tmp_path / "changes.json"),
        ("--compare", new, old, "--json", "-"),
    )
    assert same[0] == 0
    assert "0 lost, 0 gained, 0 changed" in same[1]
    assert worse[0] == 1
    assert "lost     add float32: runs: passes -> differs (off by one)" in worse[1]
    changes = json.loads((tmp_path / "changes.json").read_text())
    assert changes["schema"] == table.CHANGES_SCHEMA
    assert [one["op"] for one in changes["lost"]] == ["add"]
    assert better[0] == 0
    assert [one["op"] for one in json.loads(better[1])["gained"]] == ["add"]


def test_another_document_is_not_compared(tmp_path: Path) -> None:
    old = put(tmp_path / "old.json", document())
    other, cut = {"schema": "tpuforge.health/1"}, {"schema": table.SCHEMA}
    cases = {json.dumps(other): "0.json", "{": "1.json", "[]": "2.json", json.dumps(cut): "damage"}
    paths = [tmp_path / f"{number}.json" for number in range(len(cases))]
    for path, text in zip(paths, cases, strict=True):
        path.write_text(text)
    ends = operators(*(("--compare", old, path) for path in paths))
    for (code, _, told), said in zip(ends, cases.values(), strict=True):
        assert code == 2, said
        assert said in told


def test_the_page_stands_alone_and_escapes_what_others_wrote() -> None:
    text = page.render(document())
    assert "aten::eig &lt;is not&gt; there" in text
    assert "<is not>" not in text
    for word in ("http:", "https:", "src=", "@import", "url("):
        assert word not in text
    assert text.count('class="op"') == 3
    assert "compiles for v6e:2x2: yes" in text
    assert "known: a defect" in text
    bare = {**document(), "audited": False, "why_not": "no simulator is mounted", "operators": {}}
    assert "The audit was not run: no simulator is mounted." in page.render(bare)


def test_the_table_follows_its_schema() -> None:
    schema = json.loads((CLI.parent / "operators" / "operators.schema.json").read_text())
    found = document()
    assert set(schema["required"]) <= set(found) == set(schema["properties"])
    cell = schema["$defs"]["cell"]["properties"]
    assert cell["status"]["enum"] == [
        table.PASSES, table.UNSUPPORTED, table.DIFFERS, table.ERROR, table.LIMIT, table.NOT_RUN,
    ]  # fmt: skip
    for cells in found["operators"].values():
        assert set(cells["float32"]) <= set(cell)
    said = cell["compiles"]["additionalProperties"]["properties"]["status"]["enum"]
    assert set(said) == {*table.COMPILED, table.NOTHING}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An out folder with an image, and with a simulator that is whole as far as can be seen."""
    folder = tmp_path / "out"
    fill(folder)
    key = simulator.key()
    made = folder / "simulator" / key
    for tree in ("pci", *(f"generations/{name}" for name in simulator.GENERATIONS)):
        (made / tree / "0000:00:05.0").mkdir(parents=True)
        (made / tree / "0000:00:05.0" / "iommu_group").symlink_to("../7")
    names = ("wrapper.so", "plugin.so", "bus.so", "vfio")
    for name in names:
        (made / name).write_text(name)
    files = {name: sha256_file(made / name) for name in names}
    put(made / "simulator.json", {"key": key, "plugin": {"wheel": "x"}, "files": files})
    return folder


def test_the_verb_runs_the_audit_once_and_then_shows_it_again(out: Path, tmp_path: Path) -> None:
    client = fake_engine(out, tmp_path / "client", report=document())
    done = forge("smoke.operators", "--dtype", "float32", "--only", "add|eig", out=out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as known" in done.stdout
    (words,) = [words for words in calls(client) if words[0] == "run"]
    command = words[words.index(DIGEST) + 1 :]
    assert command[3:9] == ["health", "operators", "--samples", "1", "--dtype", "float32"]
    assert any("/sys/bus/pci/devices" in word for word in words)
    folder = out / "operators" / "runtime-py311"
    names = ["operators.html", "operators.json", "run.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    again = forge("smoke.operators", "--dtype", "float32", "--only", "add|eig", out=out)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert sum(words[0] == "run" for words in calls(client)) == 1
    other = forge("smoke.operators", "--json", out=out)
    assert other.returncode == 0
    assert json.loads(other.stdout)["data"]["problems"] == 0
    assert sum(words[0] == "run" for words in calls(client)) == 2


def test_the_verb_fails_for_what_nobody_knew(out: Path, tmp_path: Path) -> None:
    bad = {**lost(), "exit_code": 1}
    bad["problems"] = table.problems(bad)
    fake_engine(out, tmp_path / "client", report=bad, code=1)
    for word in ("done", "nothing to do"):
        done = forge("smoke.operators", out=out)
        assert done.returncode == 1
        assert "add float32: differs: off by one" in done.stdout
        assert f"operators: {word} in" in done.stdout


def test_the_verb_fails_for_what_was_lost(out: Path, tmp_path: Path) -> None:
    fake_engine(out, tmp_path / "client", report=lost())
    old = put(tmp_path / "old.json", document())
    done = forge("smoke.operators", "--compare", str(old), out=out)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "lost     add float32: runs: passes -> differs" in done.stdout
    changes = json.loads((out / "operators/runtime-py311/changes.json").read_text())
    assert len(changes["lost"]) == 1


def test_a_table_that_was_not_left_is_an_error(out: Path, tmp_path: Path) -> None:
    fake_engine(out, tmp_path / "client", report={"schema": "else"})
    done = forge("smoke.operators", out=out)
    assert done.returncode == 2
    assert "left no table" in done.stderr
    missing = forge("smoke.operators", "--compare", str(tmp_path / "none.json"), out=out)
    assert missing.returncode == 2
    assert "no table of operators" in missing.stderr
