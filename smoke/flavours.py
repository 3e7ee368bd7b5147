"""What an image of a flavour can do beside every other image: imports, tools and one real thing.

A child image has all of its parent's packages, and runs all of the parent's checks. What its own
packages are for stands in ``flavours.toml``. The functions below are called through
:mod:`smoke.isolate` and return JSON.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoke.place import Place
from smoke.plugin import Check

FILE = Path(__file__).with_name("flavours.toml")
_FIELDS = {"imports", "tools", "checks"}

BLOCK = 128
"""Rows and columns of a block of the Pallas kernel: one tile of a TPU's matrix unit."""

TOKENS = 16


def listed(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """What each flavour is for.

    Args:
        file: The list.

    Returns:
        Flavour to ``imports``, ``tools`` and ``checks``, empty where it has none.

    Raises:
        ValueError: If the file has a key that nothing reads.
    """
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    for flavour, entry in found.items():
        if unknown := entry.keys() - _FIELDS:
            raise ValueError(f"{file.name}: {flavour} has {', '.join(sorted(unknown))}")
    return {
        flavour: {field: entry.get(field, []) for field in _FIELDS}
        for flavour, entry in found.items()
    }


def own(check: Check, here: Place, field: str) -> list[Any]:
    """What this image's flavour has in one field; without it the check is not for this image.

    Args:
        check: The running check.
        here: The installation.
        field: ``imports``, ``tools`` or ``checks``; of the last, the check itself must be named.
    """
    facts = here.facts
    if facts is None:
        check.elsewhere("outside an image nothing names a flavour")
    flavour = str(facts.get("flavour"))
    found: list[Any] = listed().get(flavour, {}).get(field, [])
    if not found or (field == "checks" and check.id.partition("@")[0] not in found):
        check.elsewhere(f"this image is of the flavour {flavour}, which has no such thing")
    return found


def import_module(name: str) -> dict[str, Any]:
    """Import a module as a user does.

    Args:
        name: Its name.

    Returns:
        Seconds that it took, and its ``version`` if it tells one.
    """
    started = time.perf_counter()
    module = importlib.import_module(name)
    return {
        "seconds": round(time.perf_counter() - started, 3),
        "version": str(getattr(module, "__version__", "")),
    }


def run_tool(command: Sequence[str], limit: float) -> str:
    """Run a command, without the suite's own packages on its path.

    Args:
        command: Its words.
        limit: Seconds.

    Returns:
        The first line that it says.

    Raises:
        AssertionError: If it is not there, fails, is late or says nothing.
    """
    words = " ".join(command)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            list(command),
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=limit,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AssertionError(f"{words}: {error}") from error
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    assert done.returncode == 0, f"{words}: exit code {done.returncode}: {' / '.join(said[-2:])}"
    assert said, f"{words}: it says nothing"
    return said[0]


def compile_kernel(target: str) -> dict[str, Any]:
    """Compile a matrix product written as a Pallas kernel, for a TPU and without one.

    Args:
        target: Topology, such as ``v6e:2x2``.

    Returns:
        ``stage`` (``topology`` if libtpu knows no such target, else ``done``), and of a finished
        compilation ``chip``, ``code_bytes``, ``peak_device_bytes`` and ``compile_seconds``.

    Raises:
        AssertionError: If the kernel did not become one of the TPU, or came out empty.
    """
    # without a TPU, jax must not look for one
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax: Any = importlib.import_module("jax")
    pallas: Any = importlib.import_module("jax.experimental.pallas")
    topologies: Any = importlib.import_module("jax.experimental.topologies")
    try:
        chip = topologies.get_topology_desc(target, platform="tpu").devices[0]
    except Exception as error:
        return {"stage": "topology", "error": str(error)}
    size = 2 * BLOCK

    def kernel(left: Any, right: Any, product: Any) -> None:
        product[...] = jax.numpy.dot(
            left[...], right[...], preferred_element_type=jax.numpy.float32
        )

    def multiply(left: Any, right: Any) -> Any:
        return pallas.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((size, size), jax.numpy.float32),
            grid=(2, 2),
            in_specs=[
                pallas.BlockSpec((BLOCK, size), lambda row, column: (row, 0)),
                pallas.BlockSpec((size, BLOCK), lambda row, column: (0, column)),
            ],
            out_specs=pallas.BlockSpec((BLOCK, BLOCK), lambda row, column: (row, column)),
        )(left, right)

    place = jax.sharding.SingleDeviceSharding(chip)
    matrix = jax.ShapeDtypeStruct((size, size), jax.numpy.bfloat16, sharding=place)
    started = time.perf_counter()
    lowered = jax.jit(multiply).lower(matrix, matrix)
    assert "tpu_custom_call" in lowered.as_text(), "the kernel was not lowered to one of the TPU"
    memory = lowered.compile().memory_analysis()
    assert memory.generated_code_size_in_bytes > 0, "libtpu made a program without code"
    return {
        "stage": "done",
        "chip": str(chip.device_kind),
        "compile_seconds": round(time.perf_counter() - started, 3),
        "code_bytes": int(memory.generated_code_size_in_bytes),
        "peak_device_bytes": int(memory.peak_memory_in_bytes),
    }


def run_transformer(relative: float, absolute: float) -> dict[str, Any]:
    """A tiny Llama of transformers, with random weights: forward on the TPU as on the CPU.

    Args:
        relative: Relative tolerance.
        absolute: Absolute tolerance.

    Returns:
        ``version`` of transformers, ``parameters``, largest ``difference`` of a logit, and
        ``forward_seconds`` of the first forward pass with its compilations.

    Raises:
        AssertionError: If the logits differ by more than the tolerances.
    """
    # nothing is fetched: a model that is made from a configuration has no files
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=4 * TOKENS,
    )
    # TorchTPU's own attention kernel is for the TPU alone
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    tokens = torch.randint(0, config.vocab_size, (2, TOKENS))
    # without a mask, transformers counts packed sequences by a scan, a limit of the simulator
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        model.to("tpu")
        started = time.perf_counter()
        logits = model(tokens.to("tpu"), attention_mask=mask.to("tpu"), use_cache=False).logits
        assert logits.device.type == "tpu", f"the logits are on {logits.device}"
        found = logits.cpu()
    seconds = time.perf_counter() - started
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)
    return {
        "version": transformers.__version__,
        "parameters": sum(one.numel() for one in model.parameters()),
        "difference": float((found - expected).abs().max()),
        "forward_seconds": round(seconds, 3),
    }
