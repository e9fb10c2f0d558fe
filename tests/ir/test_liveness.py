"""Tests of ir/liveness.py: the last step that reads each value."""

from __future__ import annotations

from fqvit.ir.liveness import last_uses


def test_last_use_is_the_last_step_that_reads_a_value() -> None:
    assert last_uses([["a"], ["a", "b"], ["b", "b"]]) == {"a": 1, "b": 2}


def test_outputs_stay_alive_after_the_last_step() -> None:
    assert last_uses([["a"], ["a", "b"]], ["a", "c"]) == {"a": 2, "b": 1, "c": 2}


def test_a_sequence_without_steps_keeps_only_its_outputs() -> None:
    assert last_uses([]) == {} and last_uses([], ["a"]) == {"a": 0}


def test_reads_may_be_any_iterables() -> None:
    assert last_uses((iter(names) for names in ("ab", "b")), iter("c")) == {"a": 0, "b": 1, "c": 2}
