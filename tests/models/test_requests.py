"""Tests of the grammar of output names."""

from __future__ import annotations

import pytest

from fqvit.errors import FqvitError
from fqvit.models.requests import MODIFIERS, NAMES, Request, parse_outputs

GOOD = {
    "logits": Request("logits"),
    "logits:i32": Request("logits", None, ("i32",)),
    "embedding": Request("embedding"),
    "embedding:u16:l2": Request("embedding", None, ("u16", "l2")),
    "embedding:l2:u16": Request("embedding", None, ("u16", "l2")),
    "class@0": Request("class", 0),
    "mean@-1:sign": Request("mean", -1, ("sign",)),
    "tokens@0012:u8": Request("tokens", 12, ("u8",)),
}
BAD = {
    "": "unknown name, expected logits, embedding, class, mean or tokens, such as",
    "cls": "unknown name",
    "Tokens": "unknown name",
    "embedding@3": "embedding has no layers, expected class, mean or tokens before @",
    "logits@0": "logits has no layers",
    "tokens@": "layer '', expected the number of a block",
    "tokens@x": "layer 'x', expected",
    "tokens@1.5": "layer '1.5', expected",
    "tokens@--1": "layer '--1', expected",
    "tokens@12345": "layer '12345', expected",
    "embedding:": "unknown modifier '', expected u8, u16, i32, l2 or sign",
    "embedding:u32": "unknown modifier 'u32'",
    "embedding:u8:u8": "a modifier is listed twice",
    "embedding:u8:u16": "more than one of u8, u16 and i32",
    "embedding:i32:l2": "i32 is the accumulator itself. Leave out l2",
    "embedding:l2:sign": "sign cannot be combined with other modifiers. Leave out l2",
    "embedding:u16:sign": "Leave out u16",
    "logits:u8": "logits are always i32. Leave out u8",
    "tokens:sign": "sign bits are for one vector per image, expected embedding, class or mean",
    "tokens@1@2": "layer '1@2', expected",
}


@pytest.mark.parametrize("text", GOOD)
def test_a_name_a_layer_and_modifiers_are_parsed(text: str) -> None:
    assert parse_outputs(text) == (GOOD[text],)


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_gives_a_one_line_error_with_the_reason(text: str) -> None:
    with pytest.raises(FqvitError) as caught:
        parse_outputs([text])
    assert str(caught.value).startswith(f"output {text!r}: {BAD[text]}") or BAD[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_may_have_commas_and_spaces() -> None:
    assert parse_outputs("embedding, tokens@9") == parse_outputs(["embedding", "tokens@9"])


def test_an_output_that_is_listed_twice_is_rejected() -> None:
    with pytest.raises(FqvitError, match=r"^output embedding:u8:l2: listed twice\. Leave one out\.$"):
        parse_outputs("embedding:u8:l2,embedding:l2:u8")


def test_labels_are_parsed_to_the_same_request() -> None:
    for request in GOOD.values():
        assert parse_outputs(request.label) == (request,)
        assert len(request.label) <= 64


def test_at_most_64_outputs_are_allowed() -> None:
    with pytest.raises(FqvitError, match="outputs: 65 names, expected at most 64"):
        parse_outputs([f"class@{i}" for i in range(65)])


def test_every_name_and_modifier_is_documented_in_the_how_to() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "how-to" / "extract-features.md").read_text()
    assert all(f"`{word}`" in page for word in (*NAMES, *MODIFIERS))
