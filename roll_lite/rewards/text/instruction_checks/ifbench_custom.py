"""IFBench: constraints of single questions."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from datetime import date
from itertools import pairwise

from roll_lite.rewards.text.instruction_checks.parts import plain, sentences, words

MULTIPLES = ["14", "21", "28", "35", "42", "49"]
QUESTION = re.compile(r"Question \d{1,9}[.):;|]?")
OPTION = re.compile(r"[A-E][.)|]\s*\w", re.IGNORECASE)
OUTER_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \t\r"
FEWEST_COUNTRIES = 52
CAPITALS = """
Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw London Brussels Prague
Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"""
CITY_COLUMNS = ["ID", "Country", "City", "Year", "Count"]
PRODUCT_COLUMNS = ["ProductID", "Category", "Brand", "Price", "Stock"]
STUDENT_COLUMNS = ["StudentID", "Subject", "Grade", "Semester", "Score"]
QUOTED = re.compile(r'(?:^|,)[ \t]*"([^"\n]*)"', re.MULTILINE)
MARK = re.compile(r"[^\w\s]")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
NAPOLEON = range(1769, 1822)


def mcq_count_length(response: str) -> bool:
    """Four questions, each longer than the previous one, with five options each; no text before the first."""
    before, *questions = QUESTION.split(response.strip())
    if before or len(questions) != 4:
        return False
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.strip().split("\n")]
        places = [place for place, line in enumerate(lines) if OPTION.match(line)]
        if len(places) != 5:
            return False
        lengths.append(len(" ".join(lines[: places[0]]).strip()))
    return all(one < two for one, two in pairwise(lengths))


def reverse_newline(response: str) -> bool:
    """Lines in reverse alphabetical order: from the line with Zimbabwe to the end, 52 or more, all different."""
    lines = [name for line in response.split("\n") if (name := line.strip(OUTER_MARKS))]
    first = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    names = [plain(line).casefold() for line in lines[first:]]
    return len(names) >= FEWEST_COUNTRIES and all(one > two for one, two in pairwise(names))


def word_reverse(response: str) -> bool:
    said = words(response)
    pairs = set(pairwise(said))
    return ("eagle", "bald") in pairs and ("bald", "eagle") not in pairs


def csv_special_character(response: str) -> bool:
    """A table in which a field in double quotes contains a special character."""
    has_one = any(MARK.search(field) for field in QUOTED.findall(response))
    return has_one and _is_table(_rows(response.split("\n")), PRODUCT_COLUMNS, 14)


def csv_quotes(response: str) -> bool:
    """A table with tabs between columns and every field in double quotes."""
    rows = [[field.strip() for field in line.split("\t")] for line in response.split("\n") if line.strip()]
    is_quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for row in rows for field in row)
    return is_quoted and _is_table([[field[1:-1] for field in row] for row in rows], STUDENT_COLUMNS, 3)


def _rows(lines: Iterable[str]) -> list[list[str]]:
    try:
        return [[field.strip() for field in row] for row in csv.reader(lines, skipinitialspace=True) if row]
    except csv.Error:
        return []


def _is_table(rows: list[list[str]], columns: list[str], count: int) -> bool:
    return len(rows) == count + 1 and rows[0] == columns and all(len(row) == len(columns) for row in rows)


def date_format_list(response: str) -> bool:
    """Dates in years of Napoleon's life."""
    days = [day.strip() for day in response.strip().split(",")]
    return all(DATE.fullmatch(day) and _is_his(day) for day in days)


def _is_his(day: str) -> bool:
    try:
        return date.fromisoformat(day).year in NAPOLEON
    except ValueError:
        return False


IFBENCH_CUSTOM: dict[str, Callable[..., bool]] = {
    # Multiples of 7 from 10 to 50, and no other number.
    "custom:multiples": lambda response: re.findall(r"\d+", response) == MULTIPLES,
    "custom:mcq_count_length": mcq_count_length,
    "custom:reverse_newline": reverse_newline,
    "custom:word_reverse": word_reverse,
    "custom:character_reverse": lambda response: "elgae dlab" in response.lower(),
    # 26 sentences, whose first letters are the alphabet.
    "custom:sentence_alphabet": lambda response: (
        [words(sentence)[0][0] for sentence in sentences(response)] == list("abcdefghijklmnopqrstuvwxyz")
    ),
    "custom:european_capitals_sort": lambda response: (
        [name.strip() for name in plain(response).split(",") if name.strip()] == CAPITALS.split()
    ),
    "custom:csv_city": lambda response: _is_table(_rows(response.split("\n")), CITY_COLUMNS, 7),
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_format_list,
}
