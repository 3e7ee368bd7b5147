"""Child images judged by this checkout's suite: what their own packages are for, on each of them.

An image that was not baked is skipped: its wheels are hundreds of megabytes, and some cannot be had
everywhere. ``./forge bake --image NAME`` bakes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image, result

HARDENED = ("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--user=4242:4242")
SUITE = ROOT / "smoke"
CHOSEN = "import.flavour or import.tools or compile.pallas or simulate.transformers"


def mount(source: Path, target: str) -> str:
    """A read-only mount."""
    return f"--mount=type=bind,source={source},target={target},readonly"


PLAIN = (*HARDENED, mount(SUITE, "/opt/tpuforge/smoke"))
"""The options of a container with this checkout's suite; the compiler is the image's own libtpu."""


@pytest.fixture(scope="module")
def simulated(image: Image) -> tuple[str, ...]:
    """The same, with a simulated chip."""
    assert image.record
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    return (
        *PLAIN,
        mount(folder, "/opt/simulator"),
        mount(folder / "pci", "/sys/bus/pci/devices"),
        mount(folder / "vfio", "/dev/vfio/7"),
        "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
        "--env=TPUFORGE_SIMULATOR=/opt/simulator",
    )


def child(image: Image, name: str) -> Image:
    """A baked image that the engine holds."""
    path = image.out / "images" / f"{name}-py311" / "image.json"
    if not path.is_file():
        pytest.skip(f"{name} was not baked here: ./forge bake --image {name}")
    made = Image(image.engine, json.loads(path.read_text()), image.out)
    if image.engine.run("image", "inspect", made.name).returncode != 0:
        pytest.skip(f"the engine does not hold {made.name}: ./forge bake --image {name}")
    return made


def judged(made: Image, tiers: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Status and severity of the checks that belong to flavours."""
    words = ("health", "--tier", tiers, "--target", "v6e:2x2", "-k", CHOSEN, "--json", "-")
    done = made.run(*words, options=options, timeout=600)
    assert done.returncode == 0, done.stderr
    return {one["id"]: one for one in json.loads(done.stdout)["checks"]}


def test_the_tools_of_dev_answer(image: Image) -> None:
    found = judged(child(image, "dev"), "import", PLAIN)
    assert {one["status"] for one in found.values()} == {"passed"}
    assert found["import.tools"]["figures"]["py-spy --version"].startswith("py-spy ")


def test_a_pallas_kernel_compiles(image: Image) -> None:
    found = judged(child(image, "pallas"), "import,compile", PLAIN)
    assert found["import.flavour"]["status"] == "passed"
    kernel = found["compile.pallas@v6e:2x2"]
    assert (kernel["status"], kernel["figures"]["chip"]) == ("passed", "TPU v6 lite")
    assert (found["import.tools"]["status"], found["import.tools"]["severity"]) == (
        "not run",
        "warning",
    )


def test_a_model_of_transformers_runs(image: Image, simulated: tuple[str, ...]) -> None:
    found = judged(child(image, "train"), "simulate", simulated)
    assert found["simulate.transformers"]["status"] == "passed"
    assert found["simulate.transformers"]["figures"]["difference"] < 1e-5


def test_a_configuration_becomes_a_model(
    image: Image, simulated: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    tmp_path.chmod(0o755)
    words = ("--config", "/model/config.json", "--target", "v6e:2x2", "--mode", "inference")
    options = (*simulated, mount(tmp_path, "/model"))
    done = child(image, "train").run(
        "health", "model", *words, "--tokens", "128", "--json", "-", options=options, timeout=600
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["targets"]["v6e:2x2"]["verdict"] == "fits"


def test_the_runtime_misses_none_of_it(image: Image) -> None:
    words = ("health", "--tier", "import", "-k", f"{CHOSEN} or import.torch", "--json", "-")
    done = image.run(*words, options=PLAIN, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tiers"]["import"]["status"] == "passed"
    assert report["tiers"]["import"]["not_run"] == 2
