"""The scan: the real pip-audit asks a database on the loopback; grype and trivy are stand-ins.

Neither of the two is a package of Debian or of the Python index, so what they write is played here
in their documented forms.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_support import Handler, serving
from tpuforge.errors import ForgeError
from tpuforge.release import scan
from trust_support import Toy, make

VULN = {
    "id": "GHSA-0000-0000-0001",
    "aliases": ["CVE-2026-00001"],
    "summary": "It breaks.",
    "affected": [
        {
            "package": {"name": "torch", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.13.1"}]}],
        }
    ],
}
GRYPE = {
    "matches": [
        {
            "vulnerability": {
                "id": "CVE-2026-00002",
                "severity": "High",
                "fix": {"versions": ["1:1.3"]},
            },
            "relatedVulnerabilities": [{"id": "GHSA-0000-0000-0002"}],
            "artifact": {"name": "zlib1g", "version": "1:1.2.13.dfsg-1", "type": "deb"},
        }
    ]
}
TRIVY = {
    "SchemaVersion": 2,
    "Results": [
        {"Target": "no vulnerabilities here"},
        {
            "Vulnerabilities": [
                {
                    "VulnerabilityID": "CVE-2026-00003",
                    "PkgName": "mawk",
                    "InstalledVersion": "1.3.4-3",
                    "FixedVersion": "1.3.5, 1.4",
                    "Severity": "LOW",
                }
            ]
        },
    ],
}


@contextlib.contextmanager
def database(vulnerable: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A database of the kind OSV that knows one vulnerable package; what it was asked."""
    asked: list[dict[str, Any]] = []

    class Serves(Handler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(query)
            known = query["package"]["name"] == vulnerable
            body = json.dumps({"vulns": [VULN]} if known else {}).encode()
            self.answer(200, body)

    with serving(Serves) as port:
        yield f"http://127.0.0.1:{port}/v1/query", asked


def stand_in(folder: Path, name: str, found: object, *, option: str, code: int = 0) -> str:
    """A program of this name, and a PATH on which it is the only scanner."""
    folder.mkdir(exist_ok=True)
    (folder / "answer.json").write_text(json.dumps(found))
    program = folder / name
    copy = f'[ "$1" = {option} ] && cp \'{folder}/answer.json\' "$2"' if found else ":"
    program.write_text(
        f"#!/bin/sh\necho \"$@\" >'{folder}/asked'\n"
        f"while [ $# -gt 0 ]; do {copy}; shift; done\necho no database >&2\nexit {code}\n"
    )
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def accept(path: Path, *entries: tuple[str, str, str]) -> Path:
    lines = ["schema = 1"]
    for name, package, until in entries:
        lines += ["[[accepted]]", f'id = "{name}"', f'package = "{package}"']
        lines += ['reason = "it is not reached"', f"until = {until}"]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    made = make(tmp_path / "out")
    made.about("sbom")
    return made


def test_pip_audit_finds_what_the_database_knows(toy: Toy, tmp_path: Path) -> None:
    with database("torch") as (url, asked):
        words = ["--scope", "wheels", "--service", "osv", "--osv-url", url]
        found = toy.about("scan", *words, code=1)["data"]
        # its database does not know the label of a build
        versions = {query["package"]["name"]: query["version"] for query in asked}
        assert versions == {"libtpu": "0.0.52", "torch": "2.13.0", "torch-tpu": "0.2.0"}
        (one,) = found["open"]
        assert (one["id"], one["package"], one["fixed"]) == ("CVE-2026-00001", "torch", ["2.13.1"])

        path = accept(tmp_path / "a.toml", ("GHSA-0000-0000-0001", "torch", "2999-01-31"))
        found = toy.about("scan", *words, "--accepted", str(path))["data"]
        assert found["open"] == []
        assert found["accepted"][0]["reason"] == "it is not reached"

        # an entry of yesterday counts no more, and is a fault of its own
        path = accept(path, ("CVE-2026-00001", "torch", "2020-01-31"))
        done = toy.verb("scan", "--image", "toy", *words, "--accepted", str(path))
        assert done.returncode == 1
        assert "was accepted until 2020-01-31: look again" in done.stdout
        assert "CVE-2026-00001" in done.stdout


def test_a_clean_image(toy: Toy) -> None:
    with database("nothing") as (url, _):
        words = ["--scope", "wheels", "--service", "osv", "--osv-url", url]
        assert toy.about("scan", *words)["data"]["open"] == []


def test_a_database_that_cannot_be_had_is_not_a_clean_image(toy: Toy) -> None:
    words = ["--scope", "wheels", "--service", "osv", "--osv-url", "http://127.0.0.1:9/"]
    found = toy.about("scan", *words, code=2)["data"]
    assert "Connection" in found["scanners"][0]["not_run"]


@pytest.mark.parametrize("name", ["grype", "trivy"])
def test_a_scanner_of_the_whole_layout(toy: Toy, tmp_path: Path, name: str) -> None:
    answer, option, package, fixed = {
        "grype": (GRYPE, "--file", "zlib1g", ["1:1.3"]),
        "trivy": (TRIVY, "--output", "mawk", ["1.3.5", "1.4"]),
    }[name]
    path = stand_in(tmp_path / "bin", name, answer, option=str(option))
    found = toy.about("scan", "--scope", "system", code=1, PATH=path)["data"]
    (one,) = found["open"]
    assert (one["package"], one["fixed"], one["by"]) == (package, fixed, name)
    assert str(toy.folder / "oci") in (tmp_path / "bin" / "asked").read_text()


def test_an_answer_of_another_form_is_not_a_clean_image(toy: Toy, tmp_path: Path) -> None:
    path = stand_in(tmp_path / "bin", "grype", {"findings": []}, option="--file")
    found = toy.about("scan", "--scope", "system", code=2, PATH=path)["data"]
    assert "another form" in found["scanners"][0]["not_run"]


def test_a_scanner_without_its_database_and_none_at_all(toy: Toy, tmp_path: Path) -> None:
    path = stand_in(tmp_path / "bin", "grype", None, option="--file", code=1)
    found = toy.about("scan", "--scope", "system", code=2, PATH=path)["data"]
    assert found["scanners"][0]["not_run"] == "no database"
    found = toy.about("scan", "--scope", "system", code=2, PATH="/usr/bin:/bin")["data"]
    assert found["scanners"][0]["not_run"] == "neither is on PATH"


def test_packages_that_no_database_knows_are_not_called_clean() -> None:
    """An index that has none of them answers pip-audit with nothing but skipped packages."""
    report = scan.Report("pip-audit", ("wheels",))
    body = {"dependencies": [{"name": "torch", "skip_reason": "Dependency not found"}]}
    scan.take_pip_audit(report, body, 1)
    assert report.not_run == "its database knows none of the 1 packages"
    report = scan.Report("pip-audit", ("wheels",))
    scan.take_pip_audit(report, body, 2)
    assert not report.not_run
    assert report.skipped == ["Dependency not found"]


def test_an_image_without_a_bill(tmp_path: Path) -> None:
    toy = make(tmp_path)
    error = toy.about("scan", code=2)["error"]
    assert "./forge sbom --image toy" in error["mend"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "schema is missing"),
        ("schema = 2", "schema is 2"),
        ("schema = 1\nother = 2", "other is an unknown key"),
        ('schema = 1\n[[accepted]]\nid = "x"', "accepted[1].package is missing"),
        (
            'schema = 1\n[[accepted]]\nid = "x"\npackage = "y"\nreason = ""\nuntil = 2027-01-31',
            "accepted[1].reason is ''",
        ),
        (
            'schema = 1\n[[accepted]]\nid = "x"\npackage = "y"\nreason = "z"\nuntil = "2027"',
            "accepted[1].until is '2027'",
        ),
        ("schema = [", "Invalid"),
    ],
)
def test_a_list_of_the_accepted_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "v.toml"
    path.write_text(text)
    with pytest.raises(ForgeError, match=re.escape(said)) as caught:
        scan.read_accepted(path)
    assert caught.value.exit_code == 1


def test_the_projects_own_list_can_be_read() -> None:
    assert scan.read_accepted(scan.ACCEPTED) == []
