"""Test the measurement of the machine's peak throughput, but not the measured value."""

from __future__ import annotations

import pytest

from fqvit.errors import FqvitError
from fqvit.runtime.native import ISA, instruction_sets, measure_peak


def test_the_peak_of_every_instruction_set_is_measured() -> None:
    peaks = [measure_peak(isa) for isa in instruction_sets()]
    assert [peak.isa for peak in peaks] == instruction_sets() and all(peak.gmacs > 0.01 for peak in peaks)


def test_the_default_is_the_instruction_set_that_engines_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA, raising=False)
    assert measure_peak().isa == instruction_sets()[0]
    monkeypatch.setenv(ISA, "scalar")
    assert measure_peak().isa == "scalar"


def test_an_unknown_instruction_set_is_rejected() -> None:
    with pytest.raises(FqvitError, match="abacus"):
        measure_peak("abacus")
