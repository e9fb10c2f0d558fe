"""One change at a time to a Python file: which there are, and the file with one of them.

A mutation is a small mistake that somebody could make: another operator, a bound by one, a branch always or never taken, a
check left out, min for max. Left alone: docstrings, annotations, asserts, and all strings, since most are messages.
Neighbour: mutants.py, which runs the tests on every one.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.MatMult: ast.Mult,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
PAIRS = ("min max", "minimum maximum", "amin amax", "argmin argmax", "floor ceil", "any all", "zeros ones")
NAMES = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])} | {
    "round": "int",
    "abs": "int",
    "sorted": "list",
}
SILENT = ("FqvitError", "ValueError", "RuntimeError", "fail", "warn", "describe")  # what only words go into


@dataclass(frozen=True)
class Mutation:
    """The change number `number` of a file: at `line`, `was` -> `now`. statement: the lines of the one that holds it, None
    where it runs when the file is imported."""

    number: int
    line: int
    statement: tuple[int, int] | None
    was: str
    now: str


Change = Callable[[Any], ast.AST]


def mutations(source: str) -> list[Mutation]:
    """Every one that there is, in the order of the file."""
    tree = ast.parse(source)
    statements = [(n.lineno, n.end_lineno or n.lineno) for n in _inside_functions(tree)]
    found = []
    for number, (node, change) in enumerate(_changes(tree)):
        line = node.target.lineno if isinstance(node, ast.comprehension) else node.lineno
        around = [(first, last) for first, last in statements if first <= line <= last]
        statement = min(around, key=lambda s: s[1] - s[0], default=None)
        found.append(Mutation(number, line, statement, _short(node), _short(change(copy.deepcopy(node)))))
    return found


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:120]


def _inside_functions(tree: ast.Module) -> Iterator[ast.stmt]:
    for f in ast.walk(tree):
        if isinstance(f, ast.FunctionDef):
            yield from (n for part in f.body for n in ast.walk(part) if isinstance(n, ast.stmt))


def mutated(source: str, number: int) -> ast.Module:
    """The file with that one change."""
    tree = ast.parse(source)
    node, change = list(_changes(tree))[number]
    replacement = ast.copy_location(change(copy.deepcopy(node)), node)

    class Swap(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return replacement if visited is node else self.generic_visit(visited)

    return ast.fix_missing_locations(Swap().visit(tree))  # type: ignore[no-any-return]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, Change]]:
    for node in _code(tree):
        yield from ((node, change) for change in _of(node))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that mean something when the program runs."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Protocol" for b in child.bases):
                continue
            yield child
            if not (isinstance(child, ast.Call) and _called(child) in SILENT):
                yield from _code(child)


def _called(call: ast.Call) -> str:
    f = call.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def _of(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and not _text(node):
        yield lambda n: _with(n, op=OPERATORS[type(n.op)]())
    if isinstance(node, ast.Compare):
        for i in range(len(node.ops)):
            yield lambda n, i=i: _with(n, ops=[COMPARISONS[type(o)]() if i == j else o for j, o in enumerate(n.ops)])
    if isinstance(node, ast.BoolOp):
        yield lambda n: _with(n, op=ast.Or() if isinstance(n.op, ast.And) else ast.And())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield lambda n: n.operand
    if isinstance(node, ast.If | ast.IfExp):
        yield lambda n: _with(n, test=ast.Constant(True))
        yield lambda n: _with(n, test=ast.Constant(False))
    if isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)):
            yield lambda n, i=i: _with(n, ifs=[test for j, test in enumerate(n.ifs) if i != j])
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield lambda n: ast.Constant(not n.value)
        elif isinstance(node.value, int):
            yield lambda n: ast.Constant(n.value + 1)
        elif isinstance(node.value, float):
            yield lambda n: ast.Constant(n.value * 1.5 or 1.0)
    if isinstance(node, ast.Call):
        f = node.func
        if isinstance(f, ast.Name) and f.id in NAMES:
            yield lambda n: _with(n, func=ast.Name(NAMES[n.func.id], ast.Load()))
        if isinstance(f, ast.Attribute) and f.attr in NAMES:
            yield lambda n: _with(n, func=ast.Attribute(n.func.value, NAMES[n.func.attr], ast.Load()))
    if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield)) or isinstance(node, ast.Raise | ast.Break):
        yield lambda n: ast.Pass()
    if isinstance(node, ast.Continue):
        yield lambda n: ast.Break()


def _text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether it joins strings, or is a type: `int | None` outside an annotation."""
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    text = any(isinstance(p, ast.JoinedStr) or (isinstance(p, ast.Constant) and isinstance(p.value, str | None)) for p in parts)
    types = isinstance(node.op, ast.BitOr) and all(
        isinstance(p, ast.Name | ast.Subscript | ast.Attribute | ast.BinOp)
        and (ast.unparse(p)[:1].isupper() or ast.unparse(p).startswith(("int", "str", "tuple", "dict", "ast.")))
        for p in parts
    )
    return text or types


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node
