"""The check of ``.bazelrc``: what is missing, misspelt or in the wrong order, in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tpuforge.build import bazelrc
from tpuforge.errors import Exit, ForgeError

# the shape of TorchTPU's own file: the flag in an inner configuration, the remote services in two
# others, "common" and "build" mixed, and a file of the user's own at the end
GOOD = """
common --announce_rc   # shown at the start
build --disk_cache=~/.cache/x
common:no_rbe --config=local
common:no_rbe --remote_cache=
common:no_rbe --remote_executor=
common:local --spawn_strategy=standalone
common:caching --remote_cache=grpcs://remote.example
common:public_caching_readonly --remote_cache="https://public.example/cache/"
common:execution --remote_executor=grpcs://remote.example \\
    --jobs=200
try-import %workspace%/user.bazelrc
build:wheel_base --//:wheel_build=True
build:wheel_common --config=caching
build:wheel_common --config=execution
build:wheel_common --config wheel_base
"""
LINE = ["wheel_common", "no_rbe"]


def source(folder: Path, text: str, **others: str) -> Path:
    (folder / ".bazelrc").write_text(text)
    for name, content in others.items():
        (folder / f"{name}.bazelrc").write_text(content)
    return folder


def test_the_shape_of_upstream_is_well(tmp_path: Path) -> None:
    folder = source(tmp_path, GOOD)
    assert bazelrc.check(folder, LINE) == []
    assert bazelrc.check(folder, ["wheel_common"]) == []
    assert bazelrc.check(folder, [*LINE, "public_caching_readonly"]) == []
    settings = bazelrc.read(folder).settings(["wheel_common"])
    assert settings["remote_executor"].value == "grpcs://remote.example"
    assert settings["jobs"].value == "200"
    assert "wheel_base" in bazelrc.read(folder).configs()
    last = bazelrc.read(folder).settings([*LINE, "public_caching_readonly"])["remote_cache"]
    assert last == bazelrc.Setting("https://public.example/cache/", ".bazelrc, line 9")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "build:wheel_common",
            "build:wheel_comon",
            ".bazelrc defines no configuration wheel_common; the nearest name there is wheel_comon",
        ),
        (
            "common:no_rbe",
            "test:no_rbe",
            ".bazelrc defines no configuration no_rbe",
        ),
        (
            "--//:wheel_build=True",
            "--//:other=True",
            "wheel_common does not set --//:wheel_build=True in .bazelrc",
        ),
        (
            "--//:wheel_build=True",
            "--//:wheel_build=False",
            "--//:wheel_build is False in the end, not True: .bazelrc, line 13 has the last word",
        ),
        (
            "--//:wheel_build=True",
            "--no//:wheel_build",
            "--//:wheel_build is False in the end, not True: .bazelrc, line 13 has the last word",
        ),
        (
            "common:no_rbe --remote_executor=\n",
            "",
            "--remote_executor is grpcs://remote.example in the end (.bazelrc, line 10):"
            " no_rbe does not clear it",
        ),
    ],
)
def test_a_fault_is_said_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert bazelrc.check(source(tmp_path, GOOD.replace(old, new)), LINE) == [said]


def test_no_rbe_before_wheel_common(tmp_path: Path) -> None:
    assert bazelrc.check(source(tmp_path, GOOD), ["no_rbe", "wheel_common"]) == [
        "--remote_executor is grpcs://remote.example in the end (.bazelrc, line 11):"
        " no_rbe stands before it"
    ]


def test_the_flag_in_other_spellings(tmp_path: Path) -> None:
    for spelling in ("--//:wheel_build", "--@//:wheel_build=1", "--@@//:wheel_build=yes"):
        text = GOOD.replace("--//:wheel_build=True", spelling)
        assert bazelrc.check(source(tmp_path, text), LINE) == []


def test_a_file_of_the_users_own_is_read_and_named(tmp_path: Path) -> None:
    folder = source(tmp_path, GOOD, user="common:no_rbe --remote_executor=grpc://mine\n")
    assert bazelrc.check(folder, LINE) == [
        "--remote_executor is grpc://mine in the end (user.bazelrc, line 1):"
        " no_rbe does not clear it"
    ]
    assert folder / "user.bazelrc" in bazelrc.read(folder).files


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert bazelrc.check(tmp_path, LINE)[0] == (
        ".bazelrc cannot be read: No such file or directory"
    )
    folder = source(tmp_path, "import %workspace%/gone.bazelrc\n" + GOOD)
    assert bazelrc.check(folder, LINE) == ["gone.bazelrc cannot be read: No such file or directory"]
    source(folder, "import %workspace%/.bazelrc\n" + GOOD)
    assert bazelrc.check(folder, LINE) == [".bazelrc imports itself"]
    source(folder, GOOD + "build --define='x\n")
    assert bazelrc.check(folder, LINE) == [".bazelrc, line 17: No closing quotation"]
    (folder / ".bazelrc").write_bytes(b"\xff\xfe")
    assert bazelrc.check(folder, LINE)[0] == ".bazelrc cannot be read: not UTF-8"


def test_words_as_real_files_have_them(tmp_path: Path) -> None:
    folder = source(
        tmp_path,
        """common --config=always_on
common:always_on --test_env=NAME
build --per_file_copt=".*@-Wno-#warnings"  # a hash in quotes is none
common --per_file_copt=x/.*[.](cc|h)$@-w
build --@rules//python:setting=yes --action_env=FLAGS="-std=c++20 -g"
startup --max_idle_secs=5
"""
        + GOOD,
    )
    assert bazelrc.check(folder, LINE) == []
    settings = bazelrc.read(folder).settings(LINE)
    assert settings["test_env"].value == "NAME"
    assert settings["per_file_copt"].value in (".*@-Wno-#warnings", "x/.*[.](cc|h)$@-w")
    assert settings["action_env"].value == "FLAGS=-std=c++20 -g"
    assert "max_idle_secs" not in settings


def test_configurations_that_name_each_other_end(tmp_path: Path) -> None:
    folder = source(tmp_path, GOOD + "build:wheel_base --config=wheel_common\n")
    assert bazelrc.check(folder, LINE) == []


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return "import %workspace%/pipe"


def _chain(folder: Path) -> str:
    for number in range(1200):
        (folder / f"{number}").write_text(f"import %workspace%/{number + 1}\n")
    return "import %workspace%/0"


def _twice_each(folder: Path) -> str:
    for number in range(24):
        (folder / f"{number}").write_text(f"import %workspace%/{number + 1}\n" * 2)
    (folder / "24").touch()
    return "import %workspace%/0"


def _configs(folder: Path) -> str:
    del folder
    return "".join(f"build:c{number} --config=c{number + 1}\n" for number in range(1500))


def _configs_twice_each(folder: Path) -> str:
    del folder
    names = [f"build:c{n} --config=c{n + 1} --config=c{n + 1}\n" for n in range(14)]
    return "".join(names) + "build:c14 --copt=-O2\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_pipe, "pipe cannot be read: not a regular file"),
        (lambda _: "import /dev/zero", "/dev/zero cannot be read: not a regular file"),
        (lambda _: "import /a\0b", "'/a\\x00b' cannot be read"),
        (lambda _: f"try-import /{'a' * 9000}\nimport /{'a' * 9000}", "File name too long"),
        (lambda _: "build --x=" + "a" * 30_000_000, "more than 131,072 bytes"),
        (_chain, "import each other more than 16 deep"),
        (_twice_each, "import each other more than 16 deep"),
        (lambda _: "import %workspace%/empty\n" * 99, "more than 32 files are imported"),
        (_configs, "name each other more than 16 deep"),
        (_configs_twice_each, "more than 20000 options"),
    ],
)
def test_settings_without_an_end_end_in_one_line(
    tmp_path: Path, make: Callable[[Path], str], said: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / ".bazelrc").write_text(make(tmp_path) + "\n")
    try:
        faults = bazelrc.check(tmp_path, ["c0"])
    except ForgeError as error:
        assert error.exit_code == Exit.FAULT
        faults = [error.found]
    assert any(said in fault and "\n" not in fault for fault in faults)
    assert max(map(len, faults)) < 10_000
