"""A check says what it is, or the suite refuses to run; progress is shown where it belongs."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from process_support import call
from smoke_suite_support import ROOT

RUN = """
import os, pytest, sys
from smoke.plugin import Suite
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # as the command has it
sys.stderr = sys.stdout
for path in sys.argv[1:]:
    suite = Suite(("v6e:2x2", "v5e:2x2"), False, {}, None)
    code = pytest.main([path, "-q", "-p", "no:cacheprovider", "-c", "/dev/null"], plugins=[suite])
    for one in suite.results:
        print(one["id"], one["status"], one["detail"], one["figures"])
    print("ended with", int(code))
"""
GOOD = 'id="static.good", purpose="p", severity="critical", remedy="r"'


def _run(tmp_path: Path, *texts: str) -> list[str]:
    """What the suite says of each of these files of checks, all of them in one process."""
    paths = [tmp_path / f"test_{number}.py" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(f"import pytest\n{text}")
    done = call([sys.executable, "-c", RUN, *paths], cwd=ROOT, timeout=60, check=True)
    return re.findall(r".*?^ended with \d$", done.stdout, re.DOTALL | re.MULTILINE)


def test_a_check_that_does_not_say_what_it_is_is_refused(tmp_path: Path) -> None:
    marked = f"@pytest.mark.check({GOOD})\n"
    cases = {
        "": "has no check marker",
        '@pytest.mark.check(id="static.x", purpose="p", severity="critical")\n': "and remedy",
        marked.replace('"r"', '""'): "and remedy",
        marked.replace("static", "statics"): "unknown tier",
        marked.replace("critical", "bad"): "unknown tier or severity",
        f"{marked}def test_a(): pass\n{marked}": "two checks are called static.good",
    }
    ends = _run(tmp_path, *(f"{text}def test_x(): pass\n" for text in cases))
    for end, said in zip(ends, cases.values(), strict=True):
        assert said in end
        assert end.endswith(f"ended with {pytest.ExitCode.USAGE_ERROR:d}")


def test_results_say_passed_failed_and_not_run(tmp_path: Path) -> None:
    marks = [f"@pytest.mark.check({GOOD.replace('good', name)})\n" for name in "abcdef"]
    (said,) = _run(
        tmp_path,
        f"""
{marks[0]}def test_a(check):
    check.detail = "fine"
    check.figures["n"] = 1
{marks[1]}def test_b():
    assert False, "bad news"
{marks[2]}def test_c(check):
    check.cannot("not here")
@pytest.fixture
def broken():
    raise RuntimeError("no ground")
{marks[3]}def test_d(broken): pass
@pytest.fixture
def late():
    yield
    raise RuntimeError("afterwards")
{marks[4]}def test_e(late): pass
{marks[5]}def test_f(target): assert target != "v5e:2x2", "no " + target
""",
    )
    lines = said.splitlines()
    assert "static.a passed fine {'n': 1}" in lines
    assert any(line.startswith("static.b failed bad news") for line in lines)
    assert "static.c not run not here {}" in lines
    assert any(line.startswith("static.d failed RuntimeError: no ground") for line in lines)
    assert any(line.startswith("static.e failed RuntimeError: afterwards") for line in lines)
    assert "static.f@v6e:2x2 passed  {}" in lines
    assert any(line.startswith("static.f@v5e:2x2 failed no v5e:2x2") for line in lines)


def test_progress_is_plain_lines_where_nobody_watches(tmp_path: Path) -> None:
    code = (
        "import sys, time; from smoke import plugin\n"
        "plugin._PLAIN_AFTER_S = 0.3\n"
        "with plugin.Progress(sys.stderr).step('some.check'): time.sleep(1)\n"
    )
    done = call([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)  # fmt: skip
    assert done.stderr.startswith("health: some.check … ")
    assert "\r" not in done.stderr


def test_progress_says_how_far_the_run_is(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    marks = [f"@pytest.mark.check({GOOD.replace('good', name)})\n" for name in "abc"]
    slow = "import time; time.sleep(0.8)"
    path.write_text(
        f"import pytest\n{marks[0]}def test_a(): pass\n{marks[1]}def test_b(): {slow}\n"
        f"{marks[2]}def test_c(): pass\n"
    )
    code = (
        "import pytest, sys; from smoke import plugin\n"
        "plugin._PLAIN_AFTER_S = 0.3\n"
        "suite = plugin.Suite((), False, {}, sys.stderr)\n"
        f"words = [{str(path)!r}, '-k', 'not test_c', '-pno:cacheprovider', '-c/dev/null']\n"
        "sys.exit(pytest.main(words, plugins=[suite]))\n"
    )
    done = call([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)  # fmt: skip
    # what a selection took away does not count
    assert done.stderr.startswith("health: 1 of 2 checks done; static.b … ")


def test_progress_needs_a_real_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from smoke import plugin

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert plugin.progress_stream() is None
    monkeypatch.setattr(sys, "stderr", None)
    assert plugin.progress_stream() is None
