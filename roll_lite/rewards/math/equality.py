"""Compare answers: numbers by exact arithmetic, constants at high precision, other formulas by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from roll_lite.rewards.math.quantities import DELIMITED, Quantity, plain_number, ratio, unwrapped

Parsed = list[Any]

CLOSE, PLACES = Fraction(1, 10_000), 6
"""Tolerances if a number is a decimal: relative difference at most CLOSE, and equal when rounded to PLACES decimals."""
LOOSE = Fraction(1, 100)
DIGITS = 60
MOST_BITS = 100_000
"""Maximum bits of powers and factorials: the time limit cannot interrupt larger computations."""
APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])|≈")
EQUALS = re.compile(rf"(?<![<>=\\:])(?<![^\d)]!)=(?!=)|{APPROXIMATELY.pattern}")
SEVERAL = re.compile(r";|,(?!\d{3}(?!\d))|\b(?:or|and)\b")
NAME = re.compile(r"(?:(?:[A-Za-z]\w*|\\[A-Za-z]+)(?:_(?:\w+|\{\w+\}))?(?:\(\s*[A-Za-z]\s*\))?)?")
NUMERAL = re.compile(r"[+-]?0[xob][\da-f]+|\(?[\da-z]*\d[\da-z]*\)?_\{?\d{1,2}\}?")
AMBIGUOUS = re.compile(r"\d\s+\d|(?:\*\*|\^)\s*(?:\d+|[A-Za-z])\s*(?:\*\*|\^)")
"""Text that math-verify misreads: 1 2 as a product, 2^3^2 as (2^3)^2."""
SET = re.compile(r"(?:\\left)?\\\{((?:(?!\\\}).)*?)(?:\\right)?\\\}|\{([^{}]*)\}", re.DOTALL)
SEPARATOR = re.compile(
    r"(\s*(?:(?<!\\),(?!\d{3}(?!\d))|(?<!\\);|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*(?:and\b|or\b)?)|([(\[{])|[)\]}]"
)
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])|±")
OPERATIONS = (
    r"\\(?:arc|ar|a)?(?:sin|cos|tan|cot|sec|csc)h?(?![A-Za-z])",
    r"\\(?:log|ln|lg)(?![A-Za-z])",
    r"\\[dt]?binom(?![A-Za-z])|!",
    r"\\(?:gcd|lcm|max|min|sup|inf|det|arg|Re|Im|dim|operatorname|[pb]?mod|deg|cap|bigcap|bigcup)(?![A-Za-z])|\\l?(?:floor|ceil)",
    r"\\end\s*\{\w*(?:matrix|array)\}(?:\s*\\right\s*\W)?\s*[\^']|\\begin\s*\{[vV]matrix|(?:\||\\[lr]?[vV]ert)\s*\\begin\s*\{\w*(?:matrix|array)",
)
"""Operations that an answer may contain only if the reference does."""
LATEX = (
    (r"(\\frac\s*\{[^{}]*\})\s*([A-Za-z])(?![A-Za-z])", r"\1{\2}"),
    (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)|√\s*\(?(\w+|(?<=\()[^()]*)\)?", r"\\sqrt{\1\2}"),
    (r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|sec|csc|ln|log|exp)(?![A-Za-z])", r"\\\1 "),
    (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\^\s*\{-1\})\s+", r"\1"),  # one function, not a product
    (r"\\varnothing", r"\\emptyset"),
    (r"\\log_\s*(\w+)\s+", r"\\log_{\1} "),
    (r"\*\*", "^"),
)
SIGNS = {"×": "times", "·": "cdot", "⋅": "cdot", "÷": "div", "π": "pi", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx"}
SIGNS |= {"±": "pm", "∪": "cup", "∩": "cap", "∈": "in", "∅": "emptyset", "∫": "int", "∑": "sum", "∏": "prod"}
SIGN = str.maketrans({sign: rf"\{name} " for sign, name in SIGNS.items()} | {"°": r"^\circ ", "−": "-"})


def as_latex(text: str) -> str:
    for pattern, replacement in LATEX:
        text = re.sub(pattern, replacement, text)
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda one: f"^{{{normalize('NFKC', one[0])}}}", text)
    text = re.sub("[₀-₉]+", lambda one: f"_{{{normalize('NFKC', one[0])}}}", text)
    return text.translate(SIGN)


def parse(text: str) -> Parsed:
    r"""Parse the whole text as one formula; empty if it is not. math-verify alone reads a bare `2\sqrt{3}` as 2."""
    import sympy  # type: ignore[import-untyped]

    number = plain_number(text)
    if number is not None:
        return as_parsed(number)
    text = re.sub(r"(\^\s*(?:\d+|\{[^{}]*\}))\s+(?=\d)", r"\1\\cdot ", as_latex(unwrapped(text)))
    if AMBIGUOUS.search(text) or DELIMITED.search(text):
        return []
    settings = library().LatexExtractionConfig()  # units stay: removal would also drop the letters of 2t, 5m and 3c
    settings = replace(settings, normalization_config=replace(settings.normalization_config, units=False))
    found = library().parse(f"${text}$", [settings], parsing_timeout=None)
    if re.search(r"\bor\b", text) and not re.search(r"\band\b|,", text):  # math-verify reads x < 1 or x > 2 as a set of relations
        found = [_united(part) for part in found]
    return [part for part in found if not isinstance(part, str) and not part.has(sympy.nan, sympy.zoo) and not _computes_infinity(part)]


def _united(part: Any) -> Any:
    import sympy

    relations = part.args if isinstance(part, sympy.FiniteSet) else ()
    is_solved = all(isinstance(one, sympy.logic.boolalg.Boolean) and all(map(_is_solved, one.atoms(sympy.Rel))) for one in relations)
    return sympy.Union(*(one.as_set() for one in relations)) if relations and is_solved and len(part.free_symbols) == 1 else part


def _computes_infinity(expression: Any) -> bool:
    """True if the expression computes with infinity, as |oo - 4|, which math-verify finds close to every number."""
    import sympy

    computed = expression.atoms(sympy.Add, sympy.Mul, sympy.Pow, sympy.Function)
    return any(one.has(sympy.oo, -sympy.oo) and one.args != (-1, sympy.oo) for one in computed)


def as_parsed(number: Quantity) -> Parsed:
    import sympy

    exact = sympy.Rational(number.value.numerator, number.value.denominator)
    return [exact if number.exact else sympy.Float(exact, 30)]


@lru_cache(maxsize=1)
def library() -> Any:
    import math_verify

    # math-verify warns that its wall-clock time limits are off; our limits are in CPU time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def same_number(gold: Quantity, found: Quantity) -> bool | None:
    """Compare quantities: exactly or, if one is a decimal, within the tolerances. None if their units are incompatible."""
    factor = ratio(found.unit, gold.unit)
    if factor is None:
        return None
    right, value = gold.value, found.value * factor
    if value == right or (gold.percent != found.percent and right == (value * 100 if found.percent else value / 100)):
        return True
    is_close = abs(right - value) <= max(abs(right), abs(value)) * CLOSE and round(right, PLACES) == round(value, PLACES)
    return is_close and not (gold.exact and found.exact)


def written_form(text: str) -> str | tuple[Fraction, ...]:
    """Return a numeral with a base (1001_2, 0x2A) in lower case without leading zeros; or a ratio's parts' shares (2/5 and 3/5 for 2:3); or
    ()."""
    text = re.sub(r"[ {}]", "", unwrapped(text)).lower().replace("\\colon", ":")
    if NUMERAL.fullmatch(text):
        return re.sub(r"\A([+-]?0[xob]|)0*(?=.)", r"\1", text)
    parts = [Fraction(part) for part in text.split(":")] if re.fullmatch(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)+", text) else []
    return tuple(part / (sum(parts) or 1) for part in parts)


def sides(text: str) -> list[str]:
    text = unwrapped(text)
    equals = [one for one in EQUALS.finditer(text) if text.count("{", 0, one.end()) == text.count("}", 0, one.end())]
    if not equals or SEVERAL.search(text, 0, equals[-1].end()):
        return [text]
    places = [0, *(place for one in equals for place in one.span()), len(text)]
    return [unwrapped(text[start:end]) for start, end in zip(places[::2], places[1::2], strict=True)]


def sides_agree(parts: Sequence[str]) -> bool:
    numbers = [number for number in map(plain_number, parts) if number is not None]
    room = CLOSE**3 if all(number.exact for number in numbers) else LOOSE
    values = [number.value for number in numbers]
    return all(abs(value - values[-1]) <= max(abs(value), abs(values[-1])) * room for value in values)


def list_of(text: str) -> list[str]:
    text = unwrapped(text)
    if found := SET.fullmatch(text):
        text = (found[1] or found[2] or "").strip()
    items, start, depth = [], 0, 0
    for found in SEPARATOR.finditer(text):
        if found[1] and not depth:
            items.append(text[start : found.start()])
            start = found.end()
        elif not found[1]:
            depth += 1 if found[2] else -1
    items = [unwrapped(item) for item in (*items, text[start:])]
    return [PLUS_MINUS.sub(sign, item) for item in items if item for sign in ("+-" if len(PLUS_MINUS.findall(item)) == 1 else "+")]


def same_expression(gold: Parsed, found: Parsed) -> bool:
    """Compare formulas with math-verify; rational constants exactly, since math-verify takes tiny numbers for 0."""
    import sympy

    if all(isinstance(one, sympy.Expr) and one.is_number for one in (*gold, *found)):
        values = [[one.doit() for one in side] for side in (gold, found)]
        if all(value.is_Rational for side in values for value in side):
            return not set(values[0]).isdisjoint(values[1])
    return bool(library().verify(gold, found, numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None))


def is_irrational(parsed: Parsed) -> bool:
    import sympy

    numbers = [one for one in parsed if isinstance(one, sympy.Expr) and one.is_number and one.is_comparable]
    return any(not is_too_large(one) and one.doit().is_rational is False for one in numbers)


def is_unfinished(gold: str, answer: str, golds: Parsed, found: Parsed) -> bool:
    """True if the answer leaves more to compute than the reference."""
    gold, answer = as_latex(gold), as_latex(answer)
    if any(re.search(operation, answer) and not re.search(operation, gold) for operation in OPERATIONS):
        return True
    return not any(one == other or _is_as_simple(one, other) for one in golds for other in found)


def _is_as_simple(gold: Any, found: Any) -> bool:
    import sympy

    if is_too_large(found) or sum(1 for _ in sympy.preorder_traversal(found)) > 4 * sum(1 for _ in sympy.preorder_traversal(gold)) + 40:
        return False
    steps = (sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product)
    if not {type(one) for one in found.atoms(*steps)} <= {type(one) for one in gold.atoms(*steps)}:
        return False
    asked, given = (one.atoms(sympy.core.relational.Relational) for one in (gold, found))
    if not isinstance(gold, sympy.Expr) and all(map(_is_solved, asked)) and not all(map(_is_solved, given)):
        return False
    wanted, work = _work(gold), _work(found)
    return isinstance(gold, sympy.Float) or (
        work[0] <= wanted[0] and (work[1] == 0 or wanted[1] > 0) and work[2] <= wanted[2] and work[3] <= wanted[3]
    )


def _is_solved(relation: Any) -> bool:
    return any(one.is_Symbol and not other.free_symbols for one, other in (relation.args, relation.args[::-1]))


def _work(expression: Any) -> tuple[int, int, int, int]:
    """Count operations left undone: (additions, additions in denominators, products, powers of powers such as (x^2)^5)."""
    import sympy

    parts = [_work(part) for part in (expression.flat() if isinstance(expression, sympy.MatrixBase) else expression.args)]
    above, below, products, powers = (sum(part[place] for part in parts) for place in range(4))
    if isinstance(expression, sympy.Add | sympy.MatAdd):
        above += len(parts) - 1
    elif isinstance(expression, sympy.Eq) and 0 not in expression.args and not _is_solved(expression):
        above += 1
    elif isinstance(expression, sympy.Union):
        joined = sympy.Union(*expression.args)
        products += len(parts) - (len(joined.args) if isinstance(joined, sympy.Union) else 1)
    elif isinstance(expression, sympy.MatMul):
        products += 1
    elif isinstance(expression, sympy.Pow) and expression.exp.is_Rational and expression.exp < 0:
        above, below, products = 0, above + below, 0
    elif isinstance(expression, sympy.Mul | sympy.Pow):
        products += _repeated_factors(expression) - sum(map(_repeated_factors, expression.args))
        exponents = (expression.exp, expression.base.as_base_exp()[1]) if expression.is_Pow else (sympy.S.One,)
        powers += all(one != 1 and (not one.is_number or (one.is_Integer and one > 0)) for one in exponents)
    return above, below, products, powers


def _repeated_factors(product: Any) -> int:
    kinds: list[Any] = []
    for factor in _factors(product):
        base, exponent = factor.as_base_exp()
        if abs(factor) == 1 or (exponent.is_Rational and exponent < 0 and (base.is_number or base.is_Add)):
            continue
        times = 2 if exponent.is_Integer and exponent > 1 and base != 10 and (base.is_Number or base.is_Add) else 1
        kinds += ["number" if base.is_Number and exponent.is_Integer else "sum" if base.is_Add else base] * times
    return len(kinds) - len(set(kinds))


def _factors(product: Any) -> list[Any]:
    return [one for factor in product.args for one in _factors(factor)] if product.is_Mul else [product]


def is_too_large(expression: Any) -> bool:
    import sympy

    for node in sympy.postorder_traversal(expression):
        if isinstance(node, sympy.factorial | sympy.factorial2 | sympy.binomial | sympy.gamma):
            size = max((abs(part.evalf(10)) for part in node.args if part.is_number), default=0) * 20
        elif isinstance(node, sympy.Pow) and node.base.is_number and node.exp.is_number and node.base != 0:
            size = abs(node.exp.evalf(10)) * max(1, abs(sympy.log(abs(node.base.evalf(10)), 2).evalf(5)))
        else:
            continue
        if not size < MOST_BITS:
            return True
    return False
