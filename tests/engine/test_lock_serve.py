"""What the lock of ``serve`` leaves out is not needed: xgrammar, with the real CPU torch alone.

The lock is for Python 3.12 and the real CPU wheel of torch at hand is one for the running Python,
so what is installed here are the releases of the lock in the files for the running Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from process_support import call
from tpuforge.lock.inputs import cpu_wheel, held_wheel, lock_path
from tpuforge.lock.names import load_names
from tpuforge.lock.resolver import RUNNING
from tpuforge.lock.sources import Source, read_source
from tpuforge.lockfile import read_lock
from tpuforge.pins import load

pytestmark = pytest.mark.network

USE = """
import importlib.util, json, sys
import torch, xgrammar

words = ["a", "b", "ab", "c", "</s>"]
kind = xgrammar.VocabType.RAW
tokens = xgrammar.TokenizerInfo(words, kind, vocab_size=len(words), stop_token_ids=[4])
compiled = xgrammar.GrammarCompiler(tokens).compile_grammar('root ::= "ab" "c"')
matcher = xgrammar.GrammarMatcher(compiled)
bitmask = xgrammar.allocate_token_bitmask(1, len(words))
steps = []
for token in (2, 3, None):
    matcher.fill_next_token_bitmask(bitmask)
    logits = torch.arange(float(len(words))).unsqueeze(0)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask)
    steps.append([value if value > float("-inf") else None for value in logits[0].tolist()])
    if token is not None:
        assert matcher.accept_token(token)
print(json.dumps({
    "torch": torch.__version__,
    "triton": importlib.util.find_spec("triton") is not None,
    "device": str(logits.device),
    "steps": steps,
}))
"""


@pytest.fixture(scope="module")
def source() -> Source:
    return read_source(Path(sys.executable))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Path:
    """An environment with the xgrammar of the lock, the real CPU torch, and no triton."""
    pins = load()
    build = cpu_wheel(pins, "torch", RUNNING)
    wheel = held_wheel(build, source.folders)
    if wheel is None:
        pytest.skip(
            f"{build.file} is neither in the wheelhouse nor in a folder that pip is told of"
        )
    packages = {p.name: p.version for p in read_lock(lock_path("serve", "3.12"))}
    # what torch itself needs, as it is locked for the running Python
    packages |= {p.name: p.version for p in read_lock(lock_path("runtime", RUNNING))}
    folder = tmp_path_factory.mktemp("serve")
    locked = [f"{n}=={v}" for n, v in packages.items() if n not in pins.cpu_builds]
    (folder / "locked").write_text("\n".join(locked), encoding="utf-8")
    gone = [f"{one.name}; sys_platform == 'never'" for one in load_names().left_out_of("serve")]
    (folder / "gone").write_text("\n".join(gone), encoding="utf-8")
    made = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "uv", "venv", "-q", str(made.parents[1])], check=True)
    words = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--quiet"]
    words += ["--python", str(made), "--only-binary", ":all:"]
    words += ["--constraints", str(folder / "locked"), "--overrides", str(folder / "gone")]
    asked = [f"xgrammar=={packages['xgrammar']}", f"torch @ {wheel.resolve().as_uri()}"]
    done = call([*words, *asked], env=source.env())
    assert done.returncode == 0, done.stderr
    return made


def test_xgrammar_masks_tokens_on_a_cpu_without_triton(python: Path) -> None:
    done = call([python, "-I", "-c", USE])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["triton"] is False
    assert found["torch"] == load().torch.full
    assert found["device"] == "cpu"
    # the grammar wants "ab" and then "c", then the end: what cannot follow is masked out
    assert found["steps"] == [
        [0.0, None, 2.0, None, None],
        [None, None, None, 3.0, None],
        [None, None, None, None, 4.0],
    ]


def test_only_what_requires_it_names_what_is_left_out(python: Path) -> None:
    done = call(
        [sys.executable, "-m", "uv", "pip", "check", "--no-config", "--python", str(python)],
        timeout=120,
    )
    assert done.returncode == 1
    missing = [line for line in done.stderr.splitlines() if "requires" in line]
    assert len(missing) == 1, done.stderr
    assert "xgrammar" in missing[0]
    assert "triton" in missing[0]
