"""What a wheel's statement tells, that it has the published form, and that it keeps secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tpuforge import pins as pins_module
from tpuforge.build.statement import (
    Build,
    Material,
    Source,
    path_for,
    public_address,
    public_line,
    statement,
    write,
)

UPSTREAM = pins_module.load().upstream.repository
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEEL = "torch_tpu-0.2.0-cp311-cp311-manylinux_2_31_x86_64.whl"
BUILD = Build(
    wheel=WHEEL,
    sha256="a" * 64,
    source=Source(UPSTREAM, "v0.2.0", COMMIT),
    python="3.11",
    configs=("wheel_common", "no_rbe"),
    remote="none",
    line=(
        "/home/me/out/bazel/bazelisk/x/bazelisk-linux_amd64",
        "--output_user_root=/home/me/out/bazel/root",
        "build",
        "--config=wheel_common",
        "--config=no_rbe",
        "--repo_env=HERMETIC_PYTHON_VERSION=3.11",
        "--define",
        "PYTHON_VERSION=3.11",
        "//ci/wheel:torch_tpu_wheel",
    ),
    materials=(
        Material("bazelisk", "b" * 64, "1.28.1", "pkg:npm/%40bazel/bazelisk@1.28.1"),
        Material("bazel", "c" * 64, "7.7.1"),
    ),
    started=datetime(2026, 11, 30, 12, 0, 0, 123, tzinfo=UTC),
    finished=datetime(2026, 11, 30, 15, 0, 9, tzinfo=timezone(timedelta(hours=2))),
    target="//ci/wheel:torch_tpu_wheel",
    epoch=1_795_996_800,
    environment={"PATH": "/usr/bin", "HOME": "/home/me"},
    folders={"$OUT": Path("/home/me/out"), "~": Path("/home/me")},
    made_sha256="d" * 64,
)


def test_what_it_tells() -> None:
    made = statement(BUILD)
    assert made["subject"] == [{"name": WHEEL, "digest": {"sha256": "a" * 64}}]
    definition = made["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "source": {"repository": UPSTREAM, "ref": "v0.2.0", "dirty": False},
        "target": "//ci/wheel:torch_tpu_wheel",
        "python": "3.11",
        "configs": ["wheel_common", "no_rbe"],
        "remote": {"kind": "none"},
    }
    assert definition["internalParameters"] == {
        "command": [
            "$OUT/bazel/bazelisk/x/bazelisk-linux_amd64",
            "--output_user_root=$OUT/bazel/root",
            *BUILD.line[2:],
        ],
        "environment": ["HOME", "PATH"],
        "sourceDateEpoch": 1_795_996_800,
    }
    assert definition["resolvedDependencies"] == [
        {
            "name": "source",
            "uri": f"git+{UPSTREAM}@{COMMIT}",
            "digest": {"gitCommit": COMMIT},
        },
        {
            "name": "bazelisk",
            "uri": "pkg:npm/%40bazel/bazelisk@1.28.1",
            "digest": {"sha256": "b" * 64},
            "annotations": {"version": "1.28.1"},
        },
        {"name": "bazel", "digest": {"sha256": "c" * 64}, "annotations": {"version": "7.7.1"}},
    ]
    metadata = made["predicate"]["runDetails"]["metadata"]
    assert metadata["startedOn"] == "2026-11-30T12:00:00Z"
    assert metadata["finishedOn"] == "2026-11-30T13:00:09Z"


def test_a_dirty_source_and_a_builder_image() -> None:
    source = Source(UPSTREAM, None, COMMIT, dirty=True, tree_sha256="e" * 64)
    made = statement(replace(BUILD, source=source, image=f"forge/builder@sha256:{'f' * 64}"))
    predicate = made["predicate"]
    used = predicate["buildDefinition"]["resolvedDependencies"]
    assert used[0]["annotations"] == {"dirty": True}
    assert used[0]["digest"] == {"gitCommit": COMMIT, "sha256": "e" * 64}
    assert used[-1] == {"name": "builder image", "digest": {"sha256": "f" * 64}}
    assert predicate["runDetails"]["builder"]["id"].endswith("/image")
    assert "ref" not in predicate["buildDefinition"]["externalParameters"]["source"]


def test_a_folder_that_is_no_git_checkout() -> None:
    made = statement(replace(BUILD, source=Source(UPSTREAM, None, None, tree_sha256="e" * 64)))
    used = made["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert used == {"name": "source", "uri": f"git+{UPSTREAM}", "digest": {"sha256": "e" * 64}}


def test_only_the_times_differ_from_run_to_run(tmp_path: Path) -> None:
    first, again = path_for(tmp_path / WHEEL), tmp_path / "again.json"
    assert first.name == f"{WHEEL}.intoto.json"
    write(first, BUILD)
    write(again, BUILD)
    assert first.read_bytes() == again.read_bytes()
    later = statement(replace(BUILD, finished=BUILD.finished + timedelta(seconds=1)))
    made = json.loads(first.read_text())
    ids = [x["predicate"]["runDetails"].pop("metadata")["invocationId"] for x in (made, later)]
    assert ids[0] != ids[1]
    assert made == later


def test_another_folder_of_the_machine_changes_nothing() -> None:
    line = [word.replace("/home/me/out", "/elsewhere") for word in BUILD.line]
    moved = replace(BUILD, line=line, folders={"$OUT": Path("/elsewhere")})
    assert statement(moved) == statement(BUILD)


SECRET = "hunter2-hunter2"
ESCAPED = "hunter2%2Fhunter2"


def test_no_secret_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_JOB_TOKEN", SECRET)
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxy-password@proxy.example:3128")
    monkeypatch.setenv("CACHE_KEY", "hunter2/hunter2")
    address = f"https://user:{SECRET}@cache.example:8443/{SECRET}/x?sig={SECRET}#{SECRET}"
    build = replace(
        BUILD,
        source=Source(f"https://oauth2:{SECRET}@git.example/r.git?token=queryword", "v1", COMMIT),
        remote="cache",
        remote_url=address,
        line=(
            *BUILD.line,
            f"--remote_cache={address}",
            "--remote_executor=grpcs://me:pa/ss@rbe.example:443/pathword",
            "--remote_proxy=me:pass@proxy.example:1/pathword",
            "--remote_header=x-auth=headerword",
            "--bes_header",
            "authorization=Bearer headerword",
            "--action_env=MODE=envword",
            "--repo_env=NOT A NAME=envword",
            "--google_credentials=/home/me/keyword.json",
            "--tls_client_key",
            "/home/me/keyword.pem",
            "--define",
            "DB_PASSWORD=defineword",
            f"--workspace_status_command=/home/{SECRET}/status",
            f"--flag={ESCAPED} proxy-password environment-word address-word",
        ),
        environment={"GITHUB_TOKEN": "environment-word", "X": "http://a:address-word@h/"},
    )
    path = tmp_path / "w.intoto.json"
    write(path, build)
    text = path.read_text()
    hidden = (SECRET, ESCAPED, "headerword", "envword", "keyword", "defineword", "pathword")
    hidden += ("environment-word", "address-word", "proxy-password", "pa/ss", "queryword", "oauth2")
    assert [word for word in hidden if word in text] == []
    told = json.loads(text)["predicate"]["buildDefinition"]
    assert told["externalParameters"]["remote"] == {
        "kind": "cache",
        "service": "https://cache.example:8443",
    }
    assert told["externalParameters"]["source"]["repository"] == "https://git.example/r.git"
    words = told["internalParameters"]["command"]
    assert "--remote_cache=https://cache.example:8443" in words
    assert "--remote_executor=grpcs://rbe.example:443" in words
    assert "--remote_proxy=proxy.example:1" in words
    assert "--remote_header=x-auth=***" in words
    assert "--action_env=MODE=***" in words
    assert "--repo_env=HERMETIC_PYTHON_VERSION=3.11" in words
    assert words[len(BUILD.line) - 1] == "//ci/wheel:torch_tpu_wheel"
    assert told["internalParameters"]["environment"] == ["GITHUB_TOKEN", "X"]


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # too short to be one, and part of ordinary words
    monkeypatch.setenv("AUTH", "bazel")
    # not the name of a secret
    monkeypatch.setenv("GIT_AUTHOR_NAME", "torch_tpu_wheel")
    line = ["bazelisk", "--google_default_credentials", "//ci/wheel:torch_tpu_wheel"]
    line += ["--define", "A=b", "--remote_cache=", "--remote_timeout=60s"]
    assert public_line(line) == line
    assert (
        statement(replace(BUILD, line=line))["predicate"]["buildDefinition"]["internalParameters"][
            "command"
        ]
        == line
    )


def test_folders_are_told_by_their_names() -> None:
    folders = {"$SOURCE": Path("/a/b"), "$OUT": Path("/a/b/out"), "$ROOT": Path("/")}
    line = ["/a/b/out/x", "--x=/a/b", "/a/bc", "/mnt/a/b", "--y=/a/b/c:/a/b/out"]
    assert public_line(line, folders) == [
        "$OUT/x",
        "--x=$SOURCE",
        "/a/bc",
        "/mnt/a/b",
        "--y=$SOURCE/c:$OUT",
    ]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://h.example/a/b.git", "https://h.example/a/b.git"),
        ("https://u:p@h.example:1/a?b=c#d", "https://h.example:1/a"),
        ("ssh://git@h.example/a", "ssh://h.example/a"),
        ("/srv/git/a", "/srv/git/a"),
        ("https://[bad/x", "https://***"),
    ],
)
def test_addresses(address: str, shown: str) -> None:
    assert public_address(address) == shown


# The fields of the published formats: Statement v1, ResourceDescriptor v1, build provenance v1.
# A trailing ! marks what they require.
DESCRIPTOR = {
    "name": str,
    "uri": str,
    "digest": dict,
    "content": str,
    "downloadLocation": str,
    "mediaType": str,
    "annotations": dict,
}
PROVENANCE = {
    "buildDefinition!": {
        "buildType!": str,
        "externalParameters!": dict,
        "internalParameters": dict,
        "resolvedDependencies": [DESCRIPTOR],
    },
    "runDetails!": {
        "builder!": {"id!": str, "builderDependencies": [DESCRIPTOR], "version": dict},
        "metadata": {"invocationId": str, "startedOn": str, "finishedOn": str},
        "byproducts": [DESCRIPTOR],
    },
}
STATEMENT = {
    "_type!": str,
    "subject!": [DESCRIPTOR],
    "predicateType!": str,
    "predicate!": PROVENANCE,
}


def faults(value: Any, form: Any, where: str) -> list[str]:
    """What does not follow a published form."""
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [f for i, item in enumerate(value) for f in faults(item, form[0], f"{where}[{i}]")]
    if isinstance(form, type):
        return [] if isinstance(value, form) and value else [f"{where}: {value!r}"]
    assert isinstance(form, Mapping)
    if not isinstance(value, dict):
        return [f"{where}: no object"]
    known = {key.rstrip("!"): inner for key, inner in form.items()}
    found = [f"{where}.{key}: unknown" for key in value.keys() - known.keys()]
    found += [
        f"{where}.{key.rstrip('!')}: missing"
        for key in form
        if key.endswith("!") and key.rstrip("!") not in value
    ]
    for key in value.keys() & known.keys():
        found += faults(value[key], known[key], f"{where}.{key}")
    if form is DESCRIPTOR and not value.keys() & {"uri", "digest", "content"}:
        found.append(f"{where}: nothing tells what it is")
    return found


@pytest.mark.parametrize(
    "build",
    [
        BUILD,
        replace(BUILD, image="sha256:" + "f" * 64, suffix=".dev1", epoch=None, made_sha256=None),
        replace(BUILD, source=Source(UPSTREAM, None, None), environment={}),
    ],
)
def test_it_has_the_published_form(build: Build) -> None:
    made = statement(build)
    assert faults(made, STATEMENT, "") == []
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    metadata = made["predicate"]["runDetails"]["metadata"]
    for key in ("startedOn", "finishedOn"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata[key])
    for descriptor in (
        *made["subject"],
        *made["predicate"]["buildDefinition"]["resolvedDependencies"],
    ):
        for algorithm, digest in descriptor.get("digest", {}).items():
            length = {"sha256": 64, "gitCommit": 40}[algorithm]
            assert re.fullmatch(rf"[0-9a-f]{{{length}}}", digest)


def test_the_check_of_the_form_finds_faults() -> None:
    made = statement(BUILD)
    made["more"] = 1
    del made["predicate"]["runDetails"]["builder"]["id"]
    made["subject"][0].pop("digest")
    assert sorted(faults(made, STATEMENT, "")) == [
        ".more: unknown",
        ".predicate.runDetails.builder.id: missing",
        ".subject[0]: nothing tells what it is",
    ]
