"""Checks of the import tier, given processes that ended in every way."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from smoke import chips, imports, isolate
from smoke import test_import as tier
from smoke.plugin import Check

SPARE = {"name": "tpu", "device": "tpu:0", "package": "torch_tpu", "leftovers": []}
CHIP = [chips.Chip("0000:00:05.0", "v6e", None)]


def _check() -> Check:
    return Check("import.x", "import", "p", "critical", "r")


def _ended(seconds: float = 4.0, peak: int = 550_000_000, **spare: Any) -> isolate.Ended:
    value = {"import_seconds": seconds, "spare": {**SPARE, **spare}}
    return isolate.Ended(value, None, None, seconds, peak, "")


def test_the_cost_of_an_import_is_bounded() -> None:
    check = _check()
    tier.test_cost(check, _ended())
    assert check.figures["import_seconds"] == 4.0
    assert check.peak_memory_bytes == 550_000_000
    for seconds, peak in ((tier.AUTOLOAD_SECONDS, 1), (1.0, tier.AUTOLOAD_BYTES)):
        with pytest.raises(AssertionError, match="the bounds are 60 s and 1000 MB"):
            tier.test_cost(_check(), _ended(seconds, peak))


def test_the_cost_of_an_import_that_failed_is_not_known() -> None:
    ended = isolate.Ended(None, "ImportError: no", "ImportError", 1.0, 1, "")
    with pytest.raises(pytest.skip.Exception, match="torch could not be imported: ImportError"):
        tier.test_cost(_check(), ended)


def test_the_spare_backend_is_called_tpu_where_a_tpu_is() -> None:
    tier.test_private_use(_check(), CHIP, _ended())
    unnamed = {"name": imports.UNNAMED, "device": f"{imports.UNNAMED}:0"}
    left = [f"torch.Tensor.is_{imports.UNNAMED}"]
    tier.test_private_use(_check(), [], _ended(**unnamed, leftovers=left))
    for seen, spare, said in (
        (CHIP, unnamed, "called privateuseone instead of tpu"),
        ([], {"name": "npu"}, "called npu instead of privateuseone"),
        (CHIP, {"package": "other"}, "torch.tpu comes from other"),
        (CHIP, {"package": None}, "torch.tpu comes from None"),
        (CHIP, {"leftovers": left}, "torch still has torch.Tensor.is_privateuseone"),
    ):
        with pytest.raises(AssertionError, match=said):
            tier.test_private_use(_check(), seen, _ended(**spare))


def test_flags_are_tried_only_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypjrt", ModuleType("pypjrt"))
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    check = _check()
    tier.test_flags(check)
    assert (check.detail, check.peak_memory_bytes) == ("neither is set", None)
