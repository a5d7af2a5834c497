"""Which answers a verifier that evaluates them as Python may be given: a model's text is never run here."""

from __future__ import annotations

import ast
import re

EVALUATING = frozenset(
    {
        "binary_matrix",
        "coin_flip",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets of reasoning-gym whose verifiers hand the answer to `eval`, to SymPy's parser, which does, or to
`Fraction`, which computes 10 ** 1e9 where one is written."""
LONGEST, LARGEST = 2_000, 1e15
"""Characters of an answer, and size of its numbers."""
_EXPONENT = re.compile(r"-?\(?(\w{1,3}|\d?\.\d{1,3}|\w{1,2} / \w{1,2})\)?")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
_FUNCTIONS |= {"exp", "log", "ln", "sqrt", "Abs", "Integral"}
_PARTS = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Call),
)


def harmless(answer: str) -> bool:
    """True for lists of values, and for a formula of numbers, variables and common functions, whose powers are small.

    Also for text that is no Python at all, and that no parser makes some of.
    """
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # SymPy reads factorials, `Fraction` other alphabets' digits.
        return answer.isascii() and not any(mark in answer for mark in "(!*")
    return len(answer) <= LONGEST and all(map(_harmless, ast.walk(tree)))


def _harmless(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= LARGEST)
        # SymPy evaluates a text within a formula; a list or a text times a number may fill the memory.
        case ast.BinOp() | ast.Call() if any(map(_is_value, ast.walk(node))):
            return False
        case ast.Call(func=func, args=arguments, keywords=keywords):
            return isinstance(func, ast.Name) and func.id in _FUNCTIONS and len(arguments) <= 2 and not keywords
        # a tower of powers, or a product in an exponent, has more digits than there is memory
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            tower = any(isinstance(part, ast.Pow) for part in ast.walk(base))
            return not tower and _EXPONENT.fullmatch(ast.unparse(exponent)) is not None
    return isinstance(node, _PARTS)


def _is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.List | ast.Tuple) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
