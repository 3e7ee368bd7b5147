"""``health model``: what a TPU would make of a user's model, without a TPU.

    health model FILE.py:FUNCTION [--target v6e:2x2] [--mode training|inference] [--json PATH|-]
    health model --config CONFIG.json [--tokens N] …

The model is lowered by the real torch_tpu on the simulated chip (:mod:`smoke.lowering`), and each
program is compiled by the real libtpu for each target (:mod:`smoke.pjrt`). The user's code runs in
a process of its own, with a limit on its time and on its memory. Every figure is one that a
compiler returned, or a sum of tensor sizes. Exit codes: 0 it compiles and fits every target, 1 it
does not, 2 could not judge, 130 interrupted. ``docs/model.md`` has the rules and the format.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import platform
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from smoke import isolate, lowering, output, pjrt, place

SCHEMA = "tpuforge.model/1"
FITS, DOES_NOT, UNJUDGED = 0, 1, 2
VERDICTS = {FITS: "fits", DOES_NOT: "does not", UNJUDGED: "unjudged"}
_COMPILE_LIMIT_S = 600.0
_GIB = 2**30
_STAGE = "stage"
_REASONS = 20
_WITHOUT_DATA = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "UserError",
)
"""Exceptions of PyTorch that mean: what happens here depends on the values of a tensor."""


class BadInputError(Exception):
    """What the user gave cannot be used: said without a stack of this program's own."""


def lower(source: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Build the user's model and lower it; called through :mod:`smoke.isolate`.

    Args:
        source: ``file`` and ``function``, or ``config`` and ``tokens``; ``mode`` and
            ``memory_bytes``.
        folder: Where the programs go, and a file that says what is being done.

    Returns:
        What was built, which programs it makes, and what stopped it.
    """
    found: dict[str, Any] = {"stopped": None, "notes": []}
    job = _Job(source, Path(folder), found)
    job.stage("importing torch")
    import torch

    # all that a process makes for itself, not what it maps of files
    resource.setrlimit(resource.RLIMIT_DATA, (source["memory_bytes"],) * 2)
    try:
        _lower(torch, _builder(job), job)
    except BadInputError as error:
        found["stopped"] = {"kind": "input", "error": str(error)}
    except lowering.NoLoweringError as error:
        found["stopped"] = {"kind": "lowering", "error": str(error)}
    return found


def _builder(job: _Job) -> Callable[[], Any]:
    source = job.source
    if source.get("config"):
        return _configured(str(source["config"]), int(source["tokens"]))
    path, name = Path(source["file"]), str(source["function"])
    job.stage(f"importing {path.name}")
    if not path.is_file():
        raise BadInputError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    import importlib.util

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInputError(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise BadInputError(f"{path.name} cannot be imported: {_said(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise BadInputError(
            f"{path.name} has no function {name}; it has {', '.join(there[:8]) or 'none'}"
        )

    def build() -> Any:
        try:
            return function()
        except Exception as error:
            raise BadInputError(f"{name} raised {_said(error, path)}") from error

    return build


def _said(error: BaseException, path: Path) -> str:
    """An exception of the user's code, with the line of the user's own file."""
    words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    mine = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return words.rstrip(": ") + (f" ({path.name}, line {mine[-1].lineno})" if mine else "")


def _configured(config: str, tokens: int) -> Callable[[], Any]:
    """A model of a Hugging Face configuration with random weights, and a batch of one text."""
    try:
        import transformers
    except ImportError as error:
        raise BadInputError(
            "transformers is not installed, and a configuration needs it: use an image of the "
            "train flavour, or give FILE:FUNCTION"
        ) from error
    import torch

    try:
        given = transformers.AutoConfig.from_pretrained(config)
    except Exception as error:
        raise BadInputError(
            f"transformers cannot read {config}: {str(error).strip().splitlines()[0]}"
        ) from error

    def build() -> Any:
        given.use_cache = False
        try:
            model = transformers.AutoModelForCausalLM.from_config(given)
        except ValueError:
            model = transformers.AutoModel.from_config(given)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        return model, {"input_ids": ids}

    return build


@dataclass
class _Job:
    """What the parts of one lowering share.

    Attributes:
        source: What the user gave, see :func:`lower`.
        folder: Where the programs go.
        found: What is told in the end.
    """

    source: Mapping[str, Any]
    folder: Path
    found: dict[str, Any]

    def stage(self, words: str) -> None:
        """Leave word of what is being done, for the case that it is never done.

        Args:
            words: Such as ``lowering``.
        """
        (self.folder / _STAGE).write_text(words, encoding="utf-8")


def _lower(torch: Any, build: Callable[[], Any], job: _Job) -> None:
    named = job.source.get("function") or job.source.get("config")
    job.stage(f"building the model ({named})")
    with lowering.fake():
        try:
            built = build()
        except BadInputError as error:
            without_values = error
        else:
            job.found["built"] = "without weights"
            _run(torch, built, job)
            return
    # some models look at the values of their own tensors while they are built
    job.stage(f"building the model ({named}), with weights")
    built = build()
    job.found["built"] = "with weights"
    job.found["notes"].append(f"built with weights; without, {without_values}")
    with lowering.fake():
        _run(torch, built, job)


def _run(torch: Any, built: Any, job: _Job) -> None:
    found, mode = job.found, job.source["mode"]
    pytree = torch.utils._pytree
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], torch.nn.Module):
        seen: dict[int, Any] = {}
        model, given = lowering.on_tpu(built[0], seen), lowering.on_tpu(built[1], seen)
        positional = () if isinstance(given, Mapping) else given
        positional = tuple(positional) if isinstance(positional, tuple | list) else (positional,)
        keywords = dict(given) if isinstance(given, Mapping) else {}
        if not any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(given)):
            raise BadInputError("the example inputs hold no tensor")
        training = mode == "training" or (
            mode == "auto"
            and model.training
            and any(one.requires_grad for one in model.parameters())
        )
        parameters = list(model.parameters())
        found |= {
            "kind": "module",
            "training": training,
            "parameters": sum(one.numel() for one in parameters),
            "parameter_bytes": sum(one.nbytes for one in parameters),
            "buffer_bytes": sum(one.nbytes for one in model.buffers()),
            "input_bytes": sum(
                one.nbytes for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor)
            ),
        }
    elif callable(built) and not isinstance(built, torch.nn.Module):
        if found["built"] != "without weights":
            raise BadInputError(f"{found['notes'][-1]}; a callable must be built without")
        model, positional, keywords, training = built, (), {}, False
        found |= {"kind": "callable", "training": None}
    else:
        raise BadInputError(
            f"it returned {_type_of(built)}; it must return (module, example inputs), or a "
            "callable that takes nothing"
        )
    job.stage("counting graph breaks")
    graded = training or found["kind"] == "callable"
    found["graphs"] = _explain(torch, model, positional, keywords, graded)
    job.stage("lowering")
    with lowering.capture(job.folder) as captured:
        try:
            with torch.set_grad_enabled(graded):
                result = torch.compile(model, backend="tpu")(*positional, **keywords)
            if training:
                job.stage("lowering the backward pass")
                _backward(torch, result)
        except Exception as error:
            found["stopped"] = _why(error)
    calls: Counter[str] = Counter(captured.eager)
    for one in captured.programs:
        calls += one.operators
    found["operators"] = dict(sorted(calls.items()))
    found["eager"] = dict(sorted(captured.eager.items()))
    # what was lowered is served, whatever the tables say
    proven = {name for one in captured.programs if not one.refused for name in one.operators}
    found["unsupported"] = sorted(
        name for name in calls if name not in proven and not lowering.supported(name)
    )
    elsewhere = [one for one in captured.programs if not one.on_tpu]
    if elsewhere:
        found["notes"].append(f"{len(elsewhere)} graphs hold no tensor on device tpu: left out")
    found["programs"] = [
        {
            "kind": one.kind,
            "path": str(one.path) if one.path else None,
            "operators": sum(one.operators.values()),
            "refused": one.refused,
            "lower_seconds": round(one.seconds, 3),
        }
        for one in captured.programs
        if one.on_tpu
    ]


def _type_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return type(value).__name__


def _backward(torch: Any, result: Any) -> None:
    """Go backward from the loss if the result has one, or else from all of it."""
    loss = getattr(result, "loss", None)
    leaves = [loss] if loss is not None else torch.utils._pytree.tree_leaves(result)
    ends = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    if not ends:
        raise BadInputError("nothing that the model returns has a gradient: use --mode inference")
    torch.autograd.backward(ends, [torch.empty_like(one) for one in ends])


def _explain(
    torch: Any, model: Any, positional: Any, keywords: Any, graded: bool
) -> dict[str, Any]:
    try:
        with torch.set_grad_enabled(graded):
            told = torch._dynamo.explain(model)(*positional, **keywords)
    except Exception as error:
        return {"graphs": None, "breaks": None, "reasons": [], "why": _first_line(error)}
    finally:
        torch._dynamo.reset()
    reasons = Counter(_reason(one) for one in told.break_reasons)
    return {
        "graphs": int(told.graph_count),
        "breaks": int(told.graph_break_count),
        "reasons": [
            {"reason": words, "times": times} for words, times in reasons.most_common(_REASONS)
        ],
        "why": None,
    }


def _reason(told: Any) -> str:
    """A graph break in one line: what it is, Dynamo's explanation, and the user's own line."""
    lines = [line.strip() for line in str(told.reason).strip().splitlines()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    words = " ".join([*lines[:1], explained.removeprefix("Explanation:").strip()]).strip()
    stack = getattr(told, "user_stack", None)
    if stack:
        words += f" ({Path(stack[-1].filename).name}, line {stack[-1].lineno})"
    return words[:400]


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _why(error: BaseException) -> dict[str, str]:
    """What stopped the lowering, by the innermost exception that says something."""
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    for one in chain:
        if isinstance(one, BadInputError):
            return {"kind": "input", "error": str(one)}
        if type(one).__name__ in _WITHOUT_DATA:
            return {"kind": "data", "error": f"{type(one).__name__}: {_first_line(one)}"}
    if any(isinstance(one, MemoryError) for one in chain):
        return {"kind": "memory", "error": _first_line(error)}
    # what wraps it says how it was come by; the first cause says what it is
    cause = next((one for one in reversed(chain) if str(one).strip()), error)
    words = f"{type(cause).__name__}: {_first_line(cause)}"
    if "is not implemented for TPU" in str(cause):
        return {"kind": "operator", "error": words}
    refused = any(type(one).__name__ == "BackendCompilerFailed" for one in chain)
    return {"kind": "refused" if refused else "model", "error": words}


def judge(
    lowered: Mapping[str, Any], compiled: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[dict[str, Any], int, list[str]]:
    """Sum up what the compilers said.

    A program needs its own peak, as libtpu counts it (arguments, results and temporaries), and
    whatever of the model's weights and inputs are not among its arguments stays in memory beside.

    Args:
        lowered: What :func:`lower` returned.
        compiled: Target to what :func:`smoke.pjrt.compile_file` returned for each program.

    Returns:
        The figures of each target, the exit code, and what is wrong, one sentence each.
    """
    resident = sum(lowered.get(f"{name}_bytes") or 0 for name in ("parameter", "buffer", "input"))
    wrong: list[str] = []
    doubt: list[str] = []
    targets: dict[str, Any] = {}
    for target, programs in compiled.items():
        done = [one for one in programs if one["stage"] == "done"]
        failed = [one for one in programs if one["stage"] != "done"]
        memory = next((one["memory_of_chip_bytes"] for one in programs if "chip" in one), None)
        needs = [
            one["peak_device_bytes"] + max(0, resident - one["argument_bytes"]) for one in done
        ]
        verdict = "fits"
        errors = []
        for one in failed:
            error = " ".join(str(one["error"]).split())[:300]
            errors.append(error)
            if one["stage"] == "compile" and one.get("kind") == "ResourceExhausted":
                verdict = "does not fit"
            elif one["stage"] == "compile" and verdict != "does not fit":
                verdict = "refused"
            elif verdict == "fits":
                verdict = "unjudged"
        if memory and needs and max(needs) > memory and verdict == "fits":
            verdict = "does not fit"
            errors.append(f"needs {max(needs) / _GIB:.2f} GiB of {memory / _GIB:.2f} GiB")
        if verdict == "fits" and (not programs or lowered.get("stopped")):
            verdict = "unjudged"
        if verdict == "unjudged":
            doubt += [f"{target}: {error}" for error in errors]
        elif verdict != "fits":
            wrong.append(f"{target}: {verdict}: {errors[0]}")
        flops = [one["flops"] for one in done]
        targets[target] = {
            "verdict": verdict,
            "chip": next((one["chip"] for one in programs if "chip" in one), None),
            "usable_hbm_bytes": memory,
            "needed_hbm_bytes": max(needs) if needs and not failed else None,
            "code_bytes": sum(one["code_bytes"] for one in done) if done and not failed else None,
            # libtpu says a negative number where it does not know
            "flops": sum(flops) if flops and not failed and min(flops) >= 0 else None,
            "compile_seconds": round(sum(one.get("compile_seconds", 0) for one in programs), 3),
            "errors": errors,
        }
    wrong[:0] = [f"no kernel for {name} on a TPU" for name in lowered.get("unsupported") or ()]
    stopped = lowered.get("stopped")
    if stopped is not None:
        refused = stopped["kind"] in ("operator", "refused")
        words = f"{_STOPPED.get(stopped['kind'], 'the model raised')}: {stopped['error']}"
        (wrong if refused else doubt).append(words)
    elif not lowered.get("programs"):
        doubt.append("nothing was lowered: none of its tensors is on device tpu")
    if wrong:
        return targets, DOES_NOT, wrong + doubt
    return targets, UNJUDGED if doubt else FITS, doubt


_STOPPED = {
    "input": "cannot be used",
    "lowering": "cannot be lowered here",
    "data": "its graph depends on values of tensors, and here they have none",
    "memory": "out of memory",
    "timeout": "too slow",
    "killed": "its process was ended",
    "signal": "its process was ended",
    "exit": "its process ended",
    "operator": "refused by torch_tpu",
    "refused": "refused by torch_tpu",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="health model",
        allow_abbrev=False,
        description="Lower a model with torch_tpu and compile it with libtpu, with no TPU. Exit "
        "codes: 0 compiles and fits, 1 does not, 2 could not judge.",
    )
    add = parser.add_argument
    add("source", nargs="?", metavar="FILE.py:FUNCTION", help="what builds the model")
    add("--config", metavar="PATH", help="a Hugging Face configuration, for random weights")
    add("--tokens", type=int, default=128, metavar="N", help="length of the text (default 128)")
    add("--target", action="append", metavar="TOPOLOGY", help="such as v6e:2x2; all for all")
    add("--mode", choices=("auto", "training", "inference"), default="auto")
    add("--limit", type=float, default=600, metavar="S", help="seconds for the model's own code")
    add("--memory", type=float, default=4, metavar="GIB", help="limit of the model's own process")
    add("--json", metavar="PATH", help="write the result there; - is standard output")
    return parser


def _source(options: argparse.Namespace) -> dict[str, Any]:
    if bool(options.source) == bool(options.config):
        raise BadInputError("give FILE.py:FUNCTION, or --config, and not both")
    common = {"mode": options.mode, "memory_bytes": int(options.memory * _GIB)}
    if options.config:
        return {"config": options.config, "tokens": options.tokens, **common}
    file, colon, function = options.source.rpartition(":")
    if not (file and colon and function.isidentifier()):
        raise BadInputError(f"{options.source!r} is not FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise BadInputError(f"there is no file {file}")
    return {"file": str(Path(file).resolve()), "function": function, **common}


def _simulated(environ: Mapping[str, str]) -> None:
    if not environ.get("TPUFORGE_SIMULATOR"):
        raise BadInputError(
            "torch_tpu lowers a model only with a chip, and no simulator is mounted: "
            "./forge model FILE.py:FUNCTION mounts one"
        )


def main(argv: Sequence[str]) -> int:
    """Run ``health model``.

    Args:
        argv: Its arguments.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(list(argv))
    started, clock = datetime.now(UTC), time.monotonic()
    try:
        source = _source(options)
        _simulated(os.environ)
    except BadInputError as error:
        print(f"health model: {error}", file=sys.stderr)
        return UNJUDGED
    targets = pjrt.targets(options.target)
    with tempfile.TemporaryDirectory(prefix="tpuforge-model-") as scratch:
        folder, kept = Path(scratch, "programs"), Path(scratch, "kept")
        folder.mkdir()
        kept.mkdir()
        lowered = _lowered(source, folder, kept, options.limit)
        compiled, unique = _compiled(lowered, targets)
    figures, code, wrong = judge(lowered, compiled)
    for one in lowered.get("programs") or ():
        one.pop("path")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 3),
        "image": place.here().facts,
        "host": {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()},
        "source": Path(source["file"]).name + f":{source['function']}"
        if "file" in source
        else source["config"],
        "model": {
            name: lowered.get(name)
            for name in (
                "kind",
                "built",
                "training",
                "parameters",
                "parameter_bytes",
                "buffer_bytes",
                "input_bytes",
            )
        },
        "graphs": lowered.get("graphs"),
        "operators": lowered.get("operators") or {},
        "eager_operators": lowered.get("eager") or {},
        "unsupported_operators": lowered.get("unsupported") or [],
        "programs": lowered.get("programs") or [],
        "distinct_programs": unique,
        "stopped": lowered.get("stopped"),
        "targets": figures,
        "verdict": VERDICTS[code],
        "exit_code": code,
        "findings": wrong,
        "notes": lowered.get("notes") or [],
        "lower_seconds": lowered.get("seconds"),
        "peak_memory_bytes": lowered.get("peak_memory_bytes"),
    }
    return _deliver(options.json, result)


def _lowered(source: Mapping[str, Any], folder: Path, kept: Path, limit: float) -> dict[str, Any]:
    """Run the user's code; whatever becomes of it, say it in one form."""
    spoken = isolate.run(pjrt.stablehlo_version, timeout=120, env=pjrt.QUIET)
    if spoken.error is not None:
        return {"stopped": {"kind": "lowering", "error": f"libtpu cannot be asked: {spoken.story}"}}
    env = {lowering.KEPT: str(kept), lowering.SPOKEN: spoken.value, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = isolate.run(lower, dict(source), str(folder), timeout=limit, env=env)
    figures = {
        "seconds": round(ended.seconds, 3),
        "peak_memory_bytes": ended.peak_memory_bytes,
    }
    if ended.error is None:
        return dict(ended.value) | figures
    doing = "starting"
    if (folder / _STAGE).is_file():
        doing = (folder / _STAGE).read_text(encoding="utf-8")
    kind = str(ended.kind)
    error = f"{ended.error} while {doing}"
    if kind == "MemoryError" or "memory" in str(ended.error).lower():
        kind = "memory"
        error += f"; the limit is {source['memory_bytes'] / _GIB:.1f} GiB (--memory)"
    return {"stopped": {"kind": kind, "error": error}} | figures


def _compiled(
    lowered: Mapping[str, Any], targets: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Compile every distinct program for every target; give each program's result by target."""
    paths = [one["path"] for one in lowered.get("programs") or () if one["path"]]
    digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]
    distinct = dict(zip(digests, paths, strict=True))

    def one(job: tuple[str, str]) -> dict[str, Any]:
        path, target = job
        ended = isolate.run(
            pjrt.compile_file, path, target, timeout=_COMPILE_LIMIT_S, env=pjrt.QUIET
        )
        if ended.error is not None:
            return {"stage": "process", "kind": ended.kind, "error": ended.story}
        return dict(ended.value)

    jobs = [(path, target) for target in targets for path in distinct.values()]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip(jobs, pool.map(one, jobs), strict=True))
    whole = {
        target: [results[distinct[digest], target] for digest in digests] for target in targets
    }
    return whole, len(distinct)


def _deliver(path: str | None, result: dict[str, Any]) -> int:
    show = sys.stderr if path == "-" else sys.stdout
    print_table(result, show)
    try:
        output.write_json(path, result)
    except OSError as error:
        print(f"health model: the result cannot be written: {error}", file=sys.stderr)
        return UNJUDGED
    return int(result["exit_code"])


def print_table(result: Mapping[str, Any], stream: TextIO) -> None:
    """Show a result to a person.

    Args:
        result: A ``tpuforge.model/1`` document.
        stream: Where to.
    """
    model, graphs = result["model"], result["graphs"] or {}
    print(f"{result['source']}", file=stream)
    if model["parameters"] is not None:
        sizes = (model["parameter_bytes"], model["buffer_bytes"], model["input_bytes"])
        weights, buffers, inputs = (f"{size / 2**20:.1f} MiB" for size in sizes)
        mode = "training" if model["training"] else "inference"
        print(
            f"  {mode}: {model['parameters']:,} parameters in {weights}, buffers {buffers}, "
            f"inputs {inputs}",
            file=stream,
        )
    if result["programs"]:
        kinds = Counter(one["kind"] for one in result["programs"])
        words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        refused = sum(one["refused"] is not None for one in result["programs"])
        words += f" ({refused} refused)" if refused else ""
        total = sum(one["operators"] for one in result["programs"])
        print(f"  programs: {words}; {total} operator calls in them", file=stream)
    if graphs.get("breaks") is not None:
        print(f"  graphs: {graphs['graphs']}, graph breaks: {graphs['breaks']}", file=stream)
        for one in graphs["reasons"]:
            print(f"    {one['times']}x {one['reason']}", file=stream)
    elif graphs.get("why"):
        print(f"  graph breaks not counted: {graphs['why']}", file=stream)
    for name in result["unsupported_operators"]:
        print(f"  no kernel on a TPU: {name}", file=stream)
    if result["targets"] and result["programs"]:
        head = ("target", "verdict", "needs", "usable HBM", "code", "GFLOP", "compiled in")
        rows = [head]
        for target, one in result["targets"].items():
            rows.append(
                (
                    target,
                    one["verdict"],
                    _gib(one["needed_hbm_bytes"]),
                    _gib(one["usable_hbm_bytes"]),
                    f"{one['code_bytes'] / 1e6:.2f} MB" if one["code_bytes"] is not None else "-",
                    f"{one['flops'] / 1e9:.2f}" if one["flops"] is not None else "-",
                    f"{one['compile_seconds']:.1f} s",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        print(file=stream)
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print("  " + "  ".join(cells).rstrip(), file=stream)
        print(file=stream)
    for note in result["notes"]:
        print(f"  note: {note}", file=stream)
    for words in result["findings"]:
        print(f"  {words}", file=stream)
    verdict = {
        FITS: "compiles and fits every target",
        DOES_NOT: "does not",
        UNJUDGED: "could not judge",
    }[result["exit_code"]]
    print(f"{verdict} ({result['seconds']:.0f} s)", file=stream, flush=True)


def _gib(size: int | None) -> str:
    return f"{size / _GIB:.3f} GiB" if size is not None else "-"
