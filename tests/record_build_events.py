"""Record what a Bazel says about builds that end in all kinds of ways.

    python tests/record_build_events.py BAZEL [CASE …] [-- OPTION …]

runs BAZEL on the small workspace of the tests and writes `unit/build_events/VERSION/CASE.json`:
the exit code, the output, the events that are of use, and the failing actions' standard error.
Paths, the host and the environment are left out. The recorded files are what the unit tests read,
so a change of Bazel's events shows as a difference here. Without a CASE all are recorded. Bazel 6
and later want ``--noenable_bzlmod`` as an OPTION, since the workspace has no registry of modules.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bazel_support import make_workspace, set_command

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "unit" / "build_events"
TARGET = "//ci/wheel:torch_tpu_wheel"
KEPT = ("namedSet", "targetCompleted", "targetConfigured", "actionCompleted", "buildFinished")
REPOSITORY = """
workspace(name = "small")
load("@bazel_tools//tools/build_defs/repo:http.bzl", "http_archive")
http_archive(name = "dep", urls = ["http://127.0.0.1:1/dep.tar.gz"], sha256 = "{digest}")
"""


class Recorder:
    """One Bazel, its workspace, and where its records go."""

    def __init__(
        self, bazel: str, cases: Sequence[str], options: Sequence[str], work: Path
    ) -> None:
        self.bazel, self.cases, self.options, self.work = bazel, cases, options, work
        self.env = {"HOME": str(work), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        self.source = make_workspace(work / "source")
        self.package = self.source / "ci" / "wheel" / "BUILD"
        said = self.bazel_says("--version")
        self.version = said.split()[-1].removesuffix("-")
        self.folder = RECORDS / self.version
        self.folder.mkdir(parents=True, exist_ok=True)

    def bazel_says(self, word: str) -> str:
        done = subprocess.run([self.bazel, word], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    def build(
        self,
        case: str,
        *more: str,
        configs: Sequence[str] = ("wheel_common", "no_rbe"),
        during: Callable[[int], None] | None = None,
    ) -> None:
        """Run one build, and write its record."""
        if self.cases and case not in self.cases:
            return
        events = self.work / f"{case}.events"
        line = [
            self.bazel,
            f"--output_user_root={self.work / 'root'}",
            "--max_idle_secs=5",
            "build",
        ]
        line += [f"--config={name}" for name in configs]
        line += ["--define=PYTHON_VERSION=3.11", "--curses=no", "--color=no", *self.options]
        line += [f"--build_event_json_file={events}", *more, TARGET]
        child = subprocess.Popen(
            line,
            cwd=self.source,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if during is not None:
            during(child.pid)
        output, _ = child.communicate()
        if child.returncode == 37 and during is None:
            print(f"{self.version} {case}: not recorded: this Bazel crashes\n{output}")
            return
        kept, files = self.strip(events)
        record = {
            "bazel": self.version,
            "code": child.returncode,
            "output": self.clean(output).splitlines(),
            "events": kept,
            "files": files,
        }
        target = self.folder / f"{case}.json"
        target.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        print(f"{self.version} {case}: exit code {child.returncode}")

    def strip(self, path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The events that are of use, and the files that they name."""
        kept: list[dict[str, Any]] = []
        files: dict[str, str] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            event = json.loads(line)
            for stream in ("stdout", "stderr"):
                uri = event.get("action", {}).get(stream, {}).get("uri", "")
                if uri:
                    files[self.clean(uri)] = self.clean(
                        Path(uri.removeprefix("file://")).read_text()
                    )
            if "started" in event:
                kept.append({"id": {"started": {}}})
            elif "buildMetrics" in event:
                summary = event["buildMetrics"].get("actionSummary", {})
                used = {
                    key: summary[key]
                    for key in ("actionsExecuted", "runnerCount")
                    if key in summary
                }
                kept.append({"id": event["id"], "buildMetrics": {"actionSummary": used}})
            elif "buildToolLogs" in event:
                logs = [
                    log for log in event["buildToolLogs"]["log"] if log["name"] == "process stats"
                ]
                kept.append({"id": event["id"], "buildToolLogs": {"log": logs}})
            elif any(name in event["id"] for name in KEPT) or "aborted" in event:
                kept.append(json.loads(self.clean(json.dumps(event))))
        return kept, files

    def clean(self, text: str) -> str:
        """A text without this machine's paths."""
        text = re.sub(rf"{re.escape(str(self.work))}/root/[0-9a-f]{{32}}", "/base", text)
        text = text.replace(str(self.source), "/source").replace(str(self.work), "/work")
        text = re.sub(r"Invocation ID: [0-9a-f-]+", "Invocation ID: 0", text)
        return re.sub(r"(pid[=: ]+)\d+", r"\g<1>1", text)

    def server(self) -> int:
        """The process id of Bazel's server."""
        (file,) = (self.work / "root").glob("*/server/server.pid.txt")
        return int(file.read_text())

    def end(self) -> None:
        """End Bazel's server."""
        line = [self.bazel, f"--output_user_root={self.work / 'root'}", "--max_idle_secs=5"]
        subprocess.run([*line, "shutdown"], cwd=self.source, env=self.env, check=True)


def record(recorder: Recorder) -> None:
    """All cases, from a good build to a killed server."""
    source, package = recorder.source, recorder.package
    mark = recorder.work / "begun"

    def then(act: Callable[[int], None]) -> Callable[[int], None]:
        def during(client: int) -> None:
            mark.unlink(missing_ok=True)
            while not mark.exists():
                time.sleep(0.1)
            act(client)

        return during

    set_command(source, "echo wheel")
    many = '[genrule(name = "g%d" % i, outs = ["o%d" % i], cmd = "echo > $@") for i in range(9)]\n'
    package.write_text(
        package.read_text().replace('glob(["*.whl"])', '["o%d" % i for i in range(9)]') + many
    )
    cache = f"--disk_cache={recorder.work / 'cache'}"
    recorder.build("good", cache)
    recorder.end()
    shutil.rmtree(recorder.work / "root")
    recorder.build("cached", cache)

    set_command(source, "for i in `seq 60`; do echo line $i of 60 >&2; done; exit 7")
    recorder.build("failed")
    set_command(source, "kill -9 $$; true")
    recorder.build("killed")
    words = "g++: fatal error: Killed signal terminated program cc1plus"
    set_command(source, f"echo {words} >&2; exit 1")
    recorder.build("compiler_killed")
    set_command(source, "dd if=/dev/zero of=/dev/full count=1; exit 1")
    recorder.build("full")
    recorder.build("no_flag", configs=("no_rbe",))
    recorder.build("no_config", configs=("wheel_commom", "no_rbe"))
    recorder.build("no_option", "--no_such_option")
    set_command(source, "echo wheel")
    recorder.build("unreachable", "--remote_executor=grpc://127.0.0.1:1")
    recorder.build(
        "no_credentials", "--google_default_credentials", "--remote_cache=https://127.0.0.1:1"
    )
    package.write_text('filegroup(name = "torch_tpu_wheel", srcs = ["@dep//:x"])\n')
    workspace = source / "WORKSPACE"
    before = workspace.read_text()
    workspace.write_text(REPOSITORY.lstrip().format(digest="0" * 64))
    recorder.build("no_fetch")
    workspace.write_text(before)
    package.write_text('filegroup(name = "other")\n')
    recorder.build("no_target")
    rule = 'genrule(name = "g%d" % i, outs = ["o%d" % i], cmd = "echo bad >&2; exit 3")'
    group = 'filegroup(name = "torch_tpu_wheel", srcs = ["g0", "g1", "g2"])'
    package.write_text(f"[{rule} for i in range(3)]\n{group}\n")
    recorder.build("three_failed", "--keep_going")
    set_command(source, f"touch {mark}; sleep 60")
    here = "--spawn_strategy=standalone"
    recorder.build(
        "interrupted", here, during=then(lambda client: os.killpg(client, signal.SIGINT))
    )
    recorder.build(
        "server_killed", here, during=then(lambda _: os.kill(recorder.server(), signal.SIGKILL))
    )


def main(argv: Sequence[str]) -> int:
    """Record with the Bazel that the command line names."""
    bazel, *rest = argv
    cut = rest.index("--") if "--" in rest else len(rest)
    with tempfile.TemporaryDirectory(prefix="events-") as name:
        recorder = Recorder(bazel, rest[:cut], rest[cut + 1 :], Path(name))
        try:
            record(recorder)
        finally:
            recorder.end()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
