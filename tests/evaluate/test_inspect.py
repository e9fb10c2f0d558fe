"""Test that the summary of a program lists all its bytes, ops, sites, proofs and weights, and that the numbers add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.evaluate.inspect import inspect, kind_of
from fqvit.ir.ops import Linear
from fqvit.ir.program import CLASSES, Program
from fqvit.quant.recipe import Recipe
from tests.cli.command_line import fqvit
from tests.evaluate.conftest import VIT, make

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_bytes_add_up_to_the_size_of_the_file(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    made.program.save(path)
    found = inspect(made.program, path)
    assert sum(found.bytes.values()) == found.total == path.stat().st_size
    assert found.weights == sum(a.nbytes for name, a in made.program.constants.items() if name.endswith(".w"))
    assert found.overhead == 100 * (found.total - found.weights - found.bytes["class names"]) / found.weights


def test_class_names_count_as_bytes_of_the_file_but_not_as_overhead(made: Any, tmp_path: Path) -> None:
    found = []
    for names in (["cat"] * 7, ["a very long name of a class" * 99] * 7):
        text = "\n".join(names).encode()
        program = replace(made.program, constants={**made.program.constants, CLASSES: np.frombuffer(text, np.uint8)})
        program.save(tmp_path / "tiny.fqvit")
        found.append(inspect(program, tmp_path / "tiny.fqvit"))
        assert found[-1].names == found[-1].bytes["class names"] == len(text)
    assert found[1].total - found[0].total > 10_000
    assert abs(found[1].extra - found[0].extra) < 32  # the header differs in the digits of its offsets and in its padding


def test_all_ops_sites_and_proofs_are_listed(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    made.program.save(path)
    found = inspect(made.program, path)
    assert [row.y for row in found.ops] == [op.y for op in made.program.ops]
    assert sum(found.op_kinds.values()) == len(made.program.ops)
    assert {row.site for row in found.sites} == set(made.program.header.sites)
    assert len(found.proofs) == len(made.program.verify().proofs)
    assert all(row.headroom > 0 and row.bound < 2**row.bits for row in found.proofs)
    assert all(row.lowest < row.highest for row in found.sites)


def test_a_program_contains_no_floats(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    made.program.save(path)
    assert inspect(made.program, path).floats == 0


def test_tightest_returns_the_proof_with_the_least_headroom_of_every_kind(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    made.program.save(path)
    found = inspect(made.program, path)
    kinds = [(row.op, row.what) for row in found.tightest()]
    assert len(set(kinds)) == len(kinds) == len({(row.op, row.what) for row in found.proofs})
    for row in found.tightest():
        assert row.headroom == min(p.headroom for p in found.proofs if (p.op, p.what) == (row.op, row.what))


def test_packed_4_bit_weights_count_as_half_a_byte_each(grouped: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    grouped.program.save(path)
    found = inspect(grouped.program, path)
    linears = [op for op in grouped.program.ops if isinstance(op, Linear)]
    weights = {op.y: grouped.program.unpacked().constants[f"{op.y}.w"].size for op in linears}
    plain = weights["patch_embed.proj"] + weights["head"]
    assert found.weights_by_bits == {4: sum(weights.values()) - plain, 8: plain} and found.groups == (16,)
    assert found.weights == (sum(weights.values()) - plain) // 2 + plain
    assert found.bytes["codebooks"] == sum(
        a.nbytes for name, a in grouped.program.constants.items() if name.endswith((".choice", ".codebooks"))
    )
    assert sum(found.bytes.values()) == found.total == path.stat().st_size
    assert found.overhead == 100 * found.extra / found.weights and found.floats == 0
    text = fqvit("inspect", path).out
    assert f"{found.weights_by_bits[4]:,} 4-bit codes" in text and "in groups of 16" in text and "codebooks" in text
    shown = fqvit("inspect", path, "--json").json
    assert shown["weights_by_bits"] == {"4": found.weights_by_bits[4], "8": plain}
    assert shown["packed_weight_bytes"] == found.weights - plain + found.bytes["codebooks"]
    assert shown["weight_bytes"] == shown["packed_weight_bytes"] + plain and shown["bytes"] == path.stat().st_size
    assert shown["bits_per_weight"] == round(8 * shown["weight_bytes"] / sum(weights.values()), 4)
    assert f"{found.packed:,} bytes of packed weights" in text and f"{found.bits_per_weight:.2f} bits per weight" in text


def test_8_bit_weights_without_groups_are_not_packed(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    made.program.save(path)
    found = inspect(made.program, path)
    assert found.weights_by_bits == {8: found.weights} and found.groups == ()
    text = fqvit("inspect", path).out
    assert f"{found.weights:,} 8-bit codes; 8.00 bits per weight" in text and "packed" not in text


@pytest.mark.parametrize("bits", [4, 6])
def test_narrow_weights_without_groups_are_packed(bits: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fqvit"
    program = make(VIT, Recipe(name="narrow", weight_bits=bits)).program
    program.save(path)
    found = inspect(program, path)
    assert list(found.weights_by_bits) == [bits] and found.groups == () and program.header.version == 2
    assert found.packed == found.linear == found.weights and bits <= found.bits_per_weight < bits + 0.3  # padded to whole bytes


def test_the_kind_of_a_constant_follows_from_its_name() -> None:
    assert kind_of("blocks.0.attn.qkv.w") == "weights"
    assert kind_of("blocks.0.attn.qkv.exponent") == "weight exponents"
    assert kind_of("blocks.0.attn.qkv.choice") == kind_of("blocks.0.attn.qkv.codebooks") == "codebooks"
    assert kind_of("alpha.3") == "power-of-two factors"
    assert kind_of("rows.0") == kind_of("relative_position_index.1") == "indices"
    assert kind_of("classes") == "class names"
    assert kind_of("zero.0") == "zero points" and kind_of("steps.12") == "channel scales"


def test_the_range_of_a_site_covers_its_decoded_codes() -> None:
    """The range is exact for sites with one zero point per Power-of-Two Factor, whose scales already include the factor."""
    kinds = set()
    for path in sorted(GOLDEN.glob("*_v?.fqvit")):
        program = Program.load(path)
        for row in inspect(program, path).sites:
            site = program.header.sites[row.site]
            if site.log2 or site.levels:
                continue
            scale, zero = site.scales_and_zeros(program.constants)
            per_alpha = site.alpha is not None and len(site.scale) == 1 and len(site.zero) > 1
            if site.alpha is not None and not per_alpha:
                alpha = program.constants[site.alpha].astype(np.float64)
                scale, zero = np.repeat(scale, len(alpha) // len(scale)), np.repeat(zero, len(alpha) // len(zero))
                scale = scale * np.exp2(alpha)
            last = 2**site.bits - 1
            assert row.lowest <= (-zero * scale).min() and ((last - zero) * scale).max() <= row.highest, row.site
            if per_alpha:
                assert (row.lowest, row.highest) == ((-zero * scale).min(), ((last - zero) * scale).max()), row.site
                assert row.zero == site.zero and row.scale == site.scale
            kinds.add((row.codes, per_alpha))
    assert kinds == {("affine", False), ("power-of-two", False), ("power-of-two", True), ("by channel", False)}
