"""Whether text a model wrote may be given to a scorer that evaluates it as Python or as a SymPy expression."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

MAX_LENGTH = 2000
MAX_EXPONENT = 999
_EVALUATES = re.compile(r"(?<![\w.])(?:eval|exec)\(|(?<![\w.])(?:sp|sympy)\.(?:parse_expr|sympify)\(")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "ln", "sqrt", "Abs", "Rational"})
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Name,
    ast.Load,
    ast.Call,
    ast.operator,
    ast.unaryop,
)


def evaluates_answers(module: ModuleType) -> bool:
    """Whether the module's source holds a call that would run an answer as code."""
    return _EVALUATES.search(inspect.getsource(module)) is not None


def is_plain(text: str) -> bool:
    """Whether ``text`` is literals, one-letter variables, arithmetic and elementary functions, with small exponents."""
    if len(text) > MAX_LENGTH:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _NODES) and _is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in _FUNCTIONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        towers = any(isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Pow) for inner in ast.walk(node.left))
        return _is_small(node.right) and not towers
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        # 'a' * 10**9 is a string of a gigabyte.
        return not any(isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)) for side in _sides(node))
    return not (isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, str, bool, type(None))))


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right


def _is_small(exponent: ast.expr) -> bool:
    if isinstance(exponent, ast.UnaryOp):
        return _is_small(exponent.operand)
    if isinstance(exponent, ast.BinOp) and isinstance(exponent.op, ast.Div):
        return _is_small(exponent.left) and _is_small(exponent.right)
    if isinstance(exponent, ast.Name):
        return True
    return (
        isinstance(exponent, ast.Constant)
        and isinstance(exponent.value, (int, float))
        and (abs(exponent.value) <= MAX_EXPONENT)
    )
