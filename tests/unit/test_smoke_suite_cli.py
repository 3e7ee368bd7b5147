"""The command ``health`` as people run it: real processes, messages and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from process_support import call
from smoke_suite_support import CLI, ROOT, Environment, image_home, lock_of, package
from tpuforge import health_report

SOUND = "static.lock or static.closure or static.record or static.cuda or static.torch-tpu"
SCHEMA = json.loads((ROOT / "smoke" / "health.schema.json").read_text())
KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,),
    "null": (type(None),), "integer": (int,), "number": (int, float),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A healthy installation, never changed."""
    return Environment(tmp_path_factory.mktemp("sound"))


def _misfit(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """Where a value does not fit a JSON schema: the few words that ours uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    known = {
        "$schema", "$id", "$defs", "title", "description", "type", "enum", "const", "minimum",
        "required", "properties", "additionalProperties", "items",
    }  # fmt: skip
    assert set(schema) <= known
    if "const" in schema and value != schema["const"]:
        return [f"{where} is {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} is {value!r}"]
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(isinstance(value, KINDS[name]) for name in names):
            return [f"{where} is {value!r}, not {names}"]
    if "minimum" in schema and value < schema["minimum"]:
        return [f"{where} is {value!r}"]
    found: list[str] = []
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [
            f"{where} has no {name}" for name in schema.get("required", []) if name not in value
        ]
        if schema.get("additionalProperties") is False:
            found += [f"{where} has {name}" for name in value if name not in properties]
        for name, inner in properties.items():
            if name in value:
                found += _misfit(value[name], inner, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += _misfit(item, schema["items"], f"{where}[{index}]")
    return found


def test_a_healthy_selection_ends_with_0_and_leaves_all_files(
    sound: Environment, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("health.json", "health.xml", "health.html")]
    options = ["--json", files[0], "--junit", files[1], "--html", files[2]]
    done = sound.run("health", "--tier", "static", "-k", SOUND, *map(str, options))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "static    passed: 5 passed" in done.stdout
    assert "import    not run: it was not asked for" in done.stdout
    assert "healthy (highest tier passed: static)" in done.stdout
    assert "\x1b[" not in done.stdout
    health = json.loads(files[0].read_text())
    assert _misfit(health, SCHEMA) == []
    assert health["image"] == sound.facts
    assert health["verdict"] == "healthy"
    assert {"name": "torch-tpu", "version": "0.2.0"} in health["packages"]
    assert [check["id"] for check in health["checks"]] == [
        "static.lock", "static.closure", "static.record", "static.cuda", "static.torch-tpu",
    ]  # fmt: skip
    assert 'tests="5"' in files[1].read_text()
    assert "</html>" in files[2].read_text()
    assert files[0].stat().st_mode & 0o777 == 0o644


def test_the_schema_refuses_what_it_should() -> None:
    found = _misfit({"schema": "tpuforge.health/2", "extra": 1}, SCHEMA)
    assert "$ has extra" in found
    assert "$ has no tiers" in found
    assert "$.schema is 'tpuforge.health/2'" in found


@pytest.mark.parametrize(
    ("form", "part"),
    [
        (health_report._REPORT, SCHEMA),
        (health_report._TIER, SCHEMA["$defs"]["tier"]),
        (health_report._CHECK, SCHEMA["$defs"]["check"]),
    ],
)
def test_the_host_reads_only_what_the_schema_promises(form: Any, part: dict[str, Any]) -> None:
    assert form.keys() <= set(part["required"])
    for name, kind in form.items():
        one = part["properties"][name]
        one = SCHEMA["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        words = one.get("type", [])
        said = {
            each for word in ([words] if isinstance(words, str) else words) for each in KINDS[word]
        }
        said |= {type(value) for value in one.get("enum", ())}
        assert set(kind if isinstance(kind, tuple) else (kind,)) == said, name


def test_json_on_standard_output_is_nothing_but_json(sound: Environment) -> None:
    done = sound.run("health", "--tier", "static", "-k", "static.lock", "--json", "-")
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "healthy" in done.stderr


def test_a_flipped_byte_ends_with_1_and_names_file_and_remedy(tmp_path: Path) -> None:
    broken = Environment(tmp_path)
    source = broken.site / "torch" / "version.py"
    source.write_text(source.read_text().replace("None", "Nome"))
    done = broken.run("health", "--tier", "static", "-k", SOUND)
    assert done.returncode == 1
    assert "torch: torch/version.py has another digest than RECORD says" in done.stdout
    assert "remedy: pull the image again" in done.stdout
    assert "unhealthy (highest tier passed: none)" in done.stdout


def test_cuda_another_commit_and_a_changed_lock_end_with_1(tmp_path: Path) -> None:
    broken = Environment(tmp_path)
    package(broken.site, "nvidia-cublas-cu12", "12.6", {"nvidia/libcublas.so.12": b""})
    image_home(
        broken.home,
        lock_of(torch="2.13.0+cpu", torch_tpu="0.2.0", libtpu="0.0.51"),
        xla_commit="0" * 40,
    )
    done = broken.run("health", "--tier", "static", "-k", SOUND)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "nvidia-cublas-cu12 12.6 is installed and not in the lock" in said
    assert "libtpu is 0.0.52, the lock says 0.0.51" in said
    assert "the library nvidia/libcublas.so.12 is there" in said
    assert "the image says 0000" in said


def test_a_warning_is_shown_and_changes_nothing(tmp_path: Path) -> None:
    odd = Environment(tmp_path)
    (odd.site / "left.py").write_text("")
    done = odd.run("health", "--tier", "static", "-k", "static.unrecorded or static.lock")
    assert done.returncode == 0
    assert "1 files that no package brought, such as left.py" in done.stdout
    assert "warning static.unrecorded" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tier", "statics"), "there is no tier statics; the tiers are static, import"),
        (("--tier", ","), "there is no tier named"),
        (("--target", "v6e"), "'v6e' is not a topology"),
        (("--merge", "gone.json"), "gone.json cannot be read"),
        (("--no-such-option",), "unrecognized arguments"),
        (("-k", "static.lock and"), "the suite itself failed"),
        (("-k", "no_such_check"), "none of its checks matches no_such_check"),
        (("--tier", "static", "-k", "static.lock", "--json", "/gone/health.json"), "No such file"),
    ],
)
def test_what_cannot_be_judged_ends_with_2_and_says_why(
    sound: Environment, arguments: tuple[str, ...], said: str
) -> None:
    done = sound.run("health", *arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stdout + done.stderr


def test_outside_an_image_critical_checks_are_not_run_and_nothing_is_judged(
    sound: Environment, tmp_path: Path
) -> None:
    done = sound.run("health", "--tier", "static", "-k", SOUND, TPUFORGE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "this is not an image" in done.stdout
    assert "could not judge" in done.stdout


def test_damaged_facts_end_with_2(sound: Environment, tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text("{")
    done = sound.run("health", "--tier", "static", TPUFORGE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "the image's own facts cannot be read" in done.stderr


def test_without_a_temporary_folder_nothing_is_judged(sound: Environment) -> None:
    code = (
        "import sys, tempfile; from smoke import cli\n"
        "def none(): raise FileNotFoundError('No usable temporary directory found')\n"
        "tempfile.gettempdir = none\n"
        "sys.exit(cli.main(['health', '--tier', 'static']))"
    )
    env = {**os.environ, "TPUFORGE_HOME": str(sound.home)}
    done = call([sys.executable, "-c", code], cwd=ROOT, env=env, timeout=60)  # fmt: skip
    assert done.returncode == 2
    assert "--tmpfs /tmp" in done.stderr


def test_two_runs_are_joined_and_other_images_are_refused(
    sound: Environment, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    sound.run("health", "--tier", "static", "-k", "static.lock", "--json", str(first))
    options = ["--tier", "device", "--merge", str(first), "--json", str(second)]
    done = sound.run("health", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    merged = json.loads(second.read_text())
    assert _misfit(merged, SCHEMA) == []
    assert merged["tiers"]["static"]["passed"] == 1
    assert merged["tiers"]["device"]["why"] == "no TPU found"
    other = json.loads(first.read_text())
    other["image"]["lock_sha256"] = "f" * 64
    first.write_text(json.dumps(other))
    done = sound.run("health", *options)
    assert done.returncode == 2
    assert "it is of another image" in done.stderr


def test_arguments_after_two_dashes_reach_pytest(sound: Environment, tmp_path: Path) -> None:
    out = tmp_path / "health.json"
    arguments = ["--tier", "static", "-k", "static.lock", "--json", str(out), "--", "-v"]
    done = sound.run("health", *arguments)
    assert done.returncode == 0
    assert "test_static.py::test_lock PASSED" in done.stderr
    assert json.loads(out.read_text())["selection"] == "static.lock -v"


def test_a_users_pytest_settings_change_nothing(sound: Environment) -> None:
    done = sound.run(
        "health", "--tier", "static", "-k", "static.lock",
        PYTEST_ADDOPTS="--collect-only", PYTEST_PLUGINS="no_such_plugin",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_without_pytest_nothing_is_judged(sound: Environment) -> None:
    done = sound.run("health", PYTHONPATH="")
    assert done.returncode == 2
    assert "pytest cannot be imported" in done.stderr


def test_without_torch_the_import_tier_is_unhealthy(sound: Environment) -> None:
    # the installation's torch is an empty module: loading it works, using it does not
    done = sound.run("health", "--tier", "import", "-k", "import.torch and not torch-tpu")
    assert done.returncode == 1
    assert "has no attribute" in done.stdout


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import no_such_module", 2, "No module named 'no_such_module'"),
        ("no Python", 2, "SyntaxError"),
        ("raise KeyboardInterrupt", 130, "health: interrupted"),
    ],
)
def test_a_suite_that_cannot_be_read_was_not_interrupted(
    tmp_path: Path, text: str, code: int, said: str
) -> None:
    (tmp_path / "test_static.py").write_text(text)
    run = (
        "import pathlib, sys; from smoke import cli\n"
        f"cli.HERE = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(cli.main(['health', '--tier', 'static']))"
    )
    done = call([sys.executable, "-c", run], cwd=ROOT, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def test_term_ends_it_at_once_with_130(sound: Environment) -> None:
    env = {**os.environ, "TPUFORGE_HOME": str(sound.home)}
    code = (
        "import sys, time; from smoke import cli, place\n"
        "def slow(): print('ready', flush=True); time.sleep(60)\n"
        "place.here = slow\n"
        "sys.exit(cli.main(['health']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    started = time.monotonic()
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) == 130
    assert time.monotonic() - started < 5
    child.stdout.close()


def test_usage_of_the_suite_itself() -> None:
    done = call([sys.executable, CLI], timeout=60)
    assert done.returncode == 2
    assert "usage: cli.py health|bench|catalogue" in done.stderr


def test_the_page_of_checks_is_current() -> None:
    done = call([sys.executable, CLI, "catalogue"], timeout=60, check=True)
    page = (ROOT / "docs" / "health.md").read_text()
    found = re.search(r"<!-- checks -->\n(.*)<!-- /checks -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == done.stdout, "write the output of cli.py catalogue into docs/health.md"
