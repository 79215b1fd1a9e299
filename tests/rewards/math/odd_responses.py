"""Odd references and responses, and a generator of responses that try to be right for several references."""

from __future__ import annotations

import random

ODD_REFERENCES = [
    *("5", "0.5", "50%", r"\sqrt{2}", r"\pi", r"\frac13\approx0.33", "3, 5", "(1,2)", r"\{1,2\}", "[0,1)", "x+1", "y=2x", "x>3", "1001_2"),
    *(r"\infty", r"\begin{pmatrix}1\\2\end{pmatrix}", "12 cm", "10:30", "no solution", "3+4i"),
]
"""One of each kind."""
ODD_ANSWERS = [
    *(r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1&2\\3\end{pmatrix}", "(-1)!", "(-2)!!", r"\infty-\infty", r"0\cdot\infty"),
    *(r"\sum_{n=1}^{\infty} n", r"\prod_{n=1}^{\infty} n", r"\int_0^\infty x dx", r"\int_{-1}^{1}\frac{1}{x}dx", r"\lim_{x\to0}\frac1x"),
    *(r"\log(0)", r"\frac{\infty}{\infty}", r"\infty^0", "0^{-1}", r"\tan(\frac{\pi}{2})", r"\binom{-1}{2}", r"\binom{5}{-2}"),
    *(r"\arcsin(2)", "x<y<z", r"\emptyset", r"\mathbb{R}", r"(-\infty,\infty)", r"[\infty,1]", "(3,1)", r"\{\}", "|x|", "i!"),
    *(r"\gcd(0,0)", r"5 \mod 0", r"\frac{d}{dx}5", r"\vec{v}", r"A\cap B", r"x \in \{1\}", "1=2=3", "()", "[]", "i^i"),
    *(r"\lfloor i \rfloor", r"\max(i,1)", "x>i", "2^{10000000000}", r"(10^{10})!", "9^{9^{9^{9}}}", "2:3:0", r"-e^2\quad ∞"),
]
"""Poles, sums without an end, numbers that fill the memory, forms that are undefined."""

JOINERS = [
    *("=", "≈", r"\approx ", r"\simeq ", ",", ", ", " or ", r"\text{ or }", " and ", ";", "+", "-", r"\pm ", r"\cdot ", "/", ":", " "),
    *("^", "<", r"\le ", r"\to ", r"\cup ", r"\cap ", "\\\\", "|", r"\quad ", "..", r"\sim ", r"\equiv ", r"\Rightarrow ", r"\in ", "!"),
    *("_", "*", "×", "%"),
]
LETTERS = ["", "m", "x", "^0", " cm", r"\pi", "%"]
NUMBERS = [
    *("0", "2", "3", "7", "12", "-1", "1/2", "2/3", "50%", "0.25", "12 cm", "$7", "3, 4", r"\{1,3\}", r"\pm 4", "2:3", "1001_2"),
    "no solution",
]
OTHERS = [
    *(r"2\sqrt{3}", r"\sqrt{2}", r"\frac{\pi}{4}", r"1+\sqrt{2}", r"\log_2 3", "2^{100}", r"\infty", "3+4i", "x+1", "2x", "x^2-1"),
    *(r"\sin x", "y=2x+1", "xy", "(1,2)", "(2,1)", "(1,2,3)", "[0,1]", "(0,1]", r"(-\infty,2)", r"(0,1)\cup(2,3)", "x > 3", r"x \ne 2"),
    *("3.14", r"\pi", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\emptyset", "C"),
]
"""References that math-verify compares. No two of all these are equal."""
ATOMS = [
    *NUMBERS,
    *OTHERS,
    *("4", "m", "x", "0m", "x^0", "0.33", r"\frac12", "½", "√3", r"\sqrt{4}", "3!", "1e3", r"2\times 10^3", "30 mm", r"5\text{ m}", "∞"),
    *("π", "()", r"\{\}", "nan", "inf", r"\mathbb{R}", "[0,5]", r"\ldots"),
]
AROUND = [
    *(r"\boxed{%s}", "%s", "$%s$", "The answer is %s.", r"\boxed{%s} or so", "<answer>%s</answer>", r"\boxed{\{%s\}}", r"\boxed{(%s)}"),
    *(r"\boxed{[%s]}", r"\boxed{\frac{%s}{1}}", r"\boxed{x=%s}", r"\boxed{%s\text{ cm}}", r"\boxed{\text{%s}}", r"\boxed{|%s|}"),
    r"\boxed{-%s}",
]


def chains() -> list[str]:
    """All the integers of a range with a letter, a unit or a power behind each and one sign between them."""
    return [rf"\boxed{{{joiner.join(f'{number}{letter}' for number in range(15))}}}" for joiner in JOINERS for letter in LETTERS]


def mixtures(count: int, seed: int) -> list[str]:
    """Numbers, lists, sets, intervals, units and formulas with any signs between them."""
    dice = random.Random(seed)
    made = []
    for _ in range(count):
        text = dice.choice(ATOMS)
        same = dice.choice(JOINERS) if dice.random() < 0.5 else None
        for _ in range(dice.randint(1, 6)):
            text += (same or dice.choice(JOINERS)) + dice.choice(ATOMS)
        made.append(dice.choice(AROUND).replace("%s", text))
    return made
