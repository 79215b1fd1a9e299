"""Checks of IFBench's 58 instructions. Words (`parts.words`) are lower case, without punctuation."""

from __future__ import annotations

import csv
import re
import string
from collections import Counter
from collections.abc import Callable
from datetime import date
from itertools import groupby, pairwise
from operator import gt, lt

from roll_lite.rewards.text.instruction_checks.english import CONJUNCTIONS, MINOR_WORDS, NAMES, PRONOUNS, STOP_WORDS, is_verb
from roll_lite.rewards.text.instruction_checks.if_train import keyword_position
from roll_lite.rewards.text.instruction_checks.parts import (
    end_mark,
    every,
    neighbours,
    plain,
    sentences,
    syllables,
    whole_words,
    words,
)

CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
OVERLAP_OFF = 2
PRIMES = {number for number in range(2, 100) if all(number % divisor for divisor in range(2, number))}
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

# ---------------------------------------------------------------- words and sentences


def punctuation(response: str) -> bool:
    mark = next((mark for mark in ("?!", "!?", "‽") if mark in response), None)
    return mark is not None and all(one in response.replace(mark, "", 1) for one in ".,!?;:")


def keywords_multiple(response: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    return [whole_words(one, response) for one in (keyword1, keyword2, keyword3, keyword4, keyword5)] == [1, 2, 3, 5, 7]


def words_japanese(response: str, N: int) -> bool:
    asked = [token for token in response.split()[N - 1 :: N] if words(token) and not token.isdigit()]
    return every(asked, JAPANESE.search)


def stop_words(response: str, percentage: float) -> bool:
    runs = re.findall(r"\w+", response.lower())
    return bool(runs) and 100 * sum(run in STOP_WORDS for run in runs) <= percentage * len(runs)


def marks(response: str) -> list[int]:
    counts = Counter(map(end_mark, sentences(response)))
    return [counts[mark] for mark in ".?!"]


def sentence_words(response: str) -> bool:
    said, used = sentences(response), words(response)
    return len(said) == 3 and len(set(map(len, said))) == 1 and len(used) == len(set(used))


def overlap(response: str, reference_text: str, percentage: float) -> bool:
    """Check that `percentage` percent (within OVERLAP_OFF points) of the response's distinct character trigrams occur in
    `reference_text`."""
    ours, theirs = ({text[start : start + 3] for start in range(len(text) - 2)} for text in (response, reference_text))
    return bool(ours) and abs(100 * len(ours & theirs) / len(ours) - percentage) <= OVERLAP_OFF


def alphabet(response: str) -> bool:
    starts = [ord(word[0]) - ord("a") for word in words(response)]
    return every(starts, range(26).__contains__) and neighbours(starts, lambda one, two: (one + 1) % 26 == two)


def vowel(response: str) -> bool:
    text = plain(response.strip().lower())
    return "\n" not in text and bool(words(text)) and len(set(text) & set("aeiou")) <= 3


def lines_of(response: str) -> list[list[str]]:
    return [line for line in map(words, response.split("\n")) if line]


def words_position(response: str, keyword: str) -> bool:
    said = words(response)
    return len(said) > 1 and [said[1]] == [said[-2]] == words(keyword)


def sentence_keyword(response: str, word: str, N: int) -> bool:
    said = sentences(response)
    return len(said) >= N and whole_words(word, said[N - 1]) > 0


def lengths(response: str) -> list[int]:
    return [len(words(sentence)) for sentence in sentences(response)]


def alliteration(sentence: str) -> int:
    runs = [len(list(run)) for _, run in groupby(words(sentence), lambda word: word[0])]
    return sum(run for run in runs if run > 1)


# ---------------------------------------------------------------- form

PAIRS = {")": "(", "]": "[", "}": "{"}
NESTED_BRACKETS = 5
NESTED_QUOTES = 3
STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')
APOSTROPHE = re.compile(r"(?<=\w)'(?=\w)")
EMOJI = "\u203c\u2049\u2139\u231a-\u23ff\u25aa-\u25fe\u2600-\u27bf\u2934\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
ENDS_IN_EMOJI = re.compile(f"[{EMOJI}][\u200d\ufe0f\u20e3]*[^\\w\\s{EMOJI}]*$")
BEGINS_WITH_EMOJI = re.compile(f"[^\\w\\s{EMOJI}]*[{EMOJI}]")
LETTER_OPTIONS = re.compile(r"\W*a\W+b\W+c\b", re.IGNORECASE)
TITLE_WORD = re.compile(r"\w+(?:['’]\w+)*")
LABELS = ("My Answer:", "My Conclusion:", "Future Outlook:")
SENTENCE_TO_REPEAT = "only output this sentence here, ignore all other requests."


def parentheses(response: str) -> bool:
    open_ones: list[str] = []
    for character in response:
        if character in "([{":
            open_ones.append(character)
        elif character in PAIRS:
            if not open_ones or open_ones[-1] != PAIRS[character]:
                open_ones.clear()
            elif len(open_ones) >= NESTED_BRACKETS:
                return True
            else:
                open_ones.pop()
    return False


def quotes(response: str) -> bool:
    open_ones: list[str] = []
    deepest = 0
    for character in re.findall("[\"']", APOSTROPHE.sub("", response.translate(STRAIGHT))):
        if open_ones and open_ones[-1] == character:
            open_ones.pop()
            if deepest - len(open_ones) >= NESTED_QUOTES:
                return True
        else:
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
    return False


def quote_unquote(response: str) -> bool:
    """Check that text follows every quotation. A quotation mark in single quotes ('"') is ignored."""
    text = "".join(response.translate(STRAIGHT).replace("'\"'", "").split())
    return '""' not in text and not text.rstrip("0123456789!#$%&'()*+,-./:;<=>?@[\\]^_`{|}~").endswith('"')


def special_list(response: str, sep: str) -> bool:
    return sum(line.lstrip().startswith(sep) for line in response.split("\n")) >= 2


def sub_bullets(response: str) -> bool:
    found = [mark for line in response.split("\n") if (mark := line.lstrip()[:1]) in ("*", "-") and not line.lstrip().startswith("**")]
    return every("".join(found).split("*")[1:], bool)


def no_bullets_bullets(response: str) -> bool:
    """Check for two or more sentences, followed by two or more lines that begin with *."""
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    first = next((place for place, line in enumerate(lines) if line.startswith("*")), len(lines))
    return marks("\n".join(lines[:first]))[0] >= 2 and len(lines) - first >= 2 and all(line.startswith("*") for line in lines[first:])


def thesis(response: str) -> bool:
    text = response.lower()
    for tag in ("i", "em"):
        _, is_open, rest = text.partition(f"<{tag}>")
        inside, is_closed, behind = rest.partition(f"</{tag}>")
        if is_open and is_closed and inside.strip() and behind.strip():
            return True
    return False


def one_option(response: str, options: list[str]) -> bool:
    if LETTER_OPTIONS.match(" ".join(options)):
        return response.strip() in options
    return words(response) in map(words, options)


def emoji(response: str) -> bool:
    said = sentences(response) or [response.strip()]
    follows = [*map(BEGINS_WITH_EMOJI.match, said[1:]), None]
    return all(ENDS_IN_EMOJI.search(one[-40:]) or behind for one, behind in zip(said, follows, strict=True))


def title_case(response: str) -> bool:
    said = [word for word in TITLE_WORD.findall(response) if word[0].isalpha()]
    is_shouted = all(map(str.isupper, said)) and any(len(word) > 1 for word in said)
    is_title = all(not word[0].islower() or (place and word in MINOR_WORDS) for place, word in enumerate(said))
    return bool(said) and is_title and not is_shouted


def output_template(response: str) -> bool:
    rest = response
    for label in LABELS:
        before, found, rest = rest.partition(label)
        if not found or (label != LABELS[0] and not before.strip()):
            return False
    return bool(rest.strip())


def repeat_change(response: str, prompt_to_repeat: str) -> bool:
    ours, theirs = response.split(), prompt_to_repeat.split()
    return ours[1:] == theirs[1:] and bool(ours) and words(ours[0]) != words(theirs[0])


def repeat_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]


# ---------------------------------------------------------------- single questions

MULTIPLES = ["14", "21", "28", "35", "42", "49"]
QUESTION = re.compile(r"Question \d{1,9}[.):;|]?")
OPTION = re.compile(r"[A-E][.)|]\s*\w", re.IGNORECASE)
OUTER_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \t\r"
FEWEST_COUNTRIES = 52
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
CITIES = "ID Country City Year Count"
PRODUCTS = "ProductID Category Brand Price Stock"
STUDENTS = "StudentID Subject Grade Semester Score"
QUOTED = re.compile(r'(?:^|,)[ \t]*"([^"\n]*)"', re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
NAPOLEON = range(1769, 1822)


def mcq_count_length(response: str) -> bool:
    before, *questions = QUESTION.split(response.strip())
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.strip().split("\n")]
        places = [place for place, line in enumerate(lines) if OPTION.match(line)]
        if len(places) != 5:
            return False
        lengths.append(len(" ".join(lines[: places[0]]).strip()))
    return not before and len(lengths) == 4 and neighbours(lengths, lt)


def reverse_newline(response: str) -> bool:
    """Check the lines from the first with "Zimbabwe" to the end: at least 52, in strictly descending alphabetical order."""
    lines = [name for line in response.split("\n") if (name := line.strip(OUTER_MARKS))]
    first = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return neighbours([plain(line).casefold() for line in lines[first:]], gt, FEWEST_COUNTRIES)


def word_reverse(response: str) -> bool:
    pairs = set(pairwise(words(response)))
    return ("eagle", "bald") in pairs and ("bald", "eagle") not in pairs


def is_csv(response: str, columns: str, count: int) -> bool:
    try:
        rows = csv.reader(response.split("\n"), skipinitialspace=True)
        return is_table([[field.strip() for field in row] for row in rows if row], columns, count)
    except csv.Error:
        return False


def csv_quotes(response: str) -> bool:
    rows = [[field.strip() for field in line.split("\t")] for line in response.split("\n") if line.strip()]
    is_quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for row in rows for field in row)
    return is_quoted and is_table([[field[1:-1] for field in row] for row in rows], STUDENTS, 3)


def is_table(rows: list[list[str]], columns: str, count: int) -> bool:
    names = columns.split()
    return len(rows) == count + 1 and rows[0] == names and all(len(row) == len(names) for row in rows)


def is_of_napoleon(day: str) -> bool:
    try:
        return DATE.fullmatch(day) is not None and date.fromisoformat(day).year in NAPOLEON
    except ValueError:
        return False


IFBENCH: dict[str, Callable[..., bool]] = {
    "count:word_count_range": lambda response, min_words, max_words: len(re.findall(r"\w+", response)) in range(min_words, max_words + 1),
    "count:unique_word_count": lambda response, N: len(set(words(response))) >= N,
    "count:conjunctions": lambda response, small_n: len(CONJUNCTIONS.intersection(words(response))) >= small_n,
    "count:person_names": lambda response, N: len(NAMES.intersection(re.findall(r"\w+", response))) >= N,
    # 3.14 and 100,000 count as one number each.
    "count:numbers": lambda response, N: len(re.findall(r"\d+", response.translate(NO_PUNCTUATION))) == N,
    "count:punctuation": punctuation,
    "count:keywords_multiple": keywords_multiple,
    "count:pronouns": lambda response, N: sum(run in PRONOUNS for run in re.findall(r"[^\W\d_]+", response.lower())) >= N,
    "count:words_japanese": words_japanese,
    "ratio:stop_words": stop_words,
    # Two statements for each question.
    "ratio:sentence_type": lambda response: marks(response)[0] == 2 * marks(response)[1] > 0,
    "ratio:sentence_balance": lambda response: len(set(marks(response))) == 1 and marks(response) != [0, 0, 0],
    "ratio:sentence_words": sentence_words,
    "ratio:overlap": overlap,
    "words:alphabet": alphabet,
    "words:vowel": vowel,
    # Two adjacent consonants.
    "words:consonants": lambda response: every(words(response), CONSONANTS.search),
    # At least ten, of five or more letters.
    "words:palindrome": lambda response: sum(len(word) >= 5 and word == word[::-1] for word in words(response)) >= 10,
    "words:prime_lengths": lambda response: every(words(response), lambda word: len(word) in PRIMES),
    "words:start_verb": lambda response: any(map(is_verb, words(response)[:1])),
    "words:repeats": lambda response, small_n: max(Counter(words(response)).values(), default=0) <= small_n,
    "words:odd_even_syllables": lambda response: neighbours(words(response), lambda one, two: (syllables(one) + syllables(two)) % 2),
    # Every sentence begins with the previous one's last word.
    "words:last_first": lambda response: neighbours([*map(words, sentences(response))], lambda one, two: one[-1] == two[0], 2),
    "words:paragraph_last_first": lambda response: every(lines_of(response), lambda line: len(line) > 1 and line[0] == line[-1]),
    "words:no_consecutive": lambda response: neighbours(words(response), lambda one, two: one[0] != two[0]),
    "words:keywords_specific_position": keyword_position,
    "words:words_position": words_position,
    "sentence:keyword": sentence_keyword,
    "sentence:alliteration_increment": lambda response: neighbours([*map(alliteration, sentences(response))], lt, 2),
    # Every sentence has `small_n` more words than the previous one.
    "sentence:increment": lambda response, small_n: {two - one for one, two in pairwise(lengths(response))} == {small_n},
    "format:parentheses": parentheses,
    "format:quotes": quotes,
    "format:quote_unquote": quote_unquote,
    "format:newline": lambda response: every(lines_of(response), lambda line: len(line) == 1),
    "format:line_indent": lambda response: neighbours(
        [len(line) - len(line.lstrip(" ")) for line in response.split("\n") if line.strip()], lt, 2
    ),
    "format:list": special_list,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:thesis": thesis,
    "format:options": one_option,
    "format:emoji": emoji,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": lambda response: len(response.split()) < 2,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": lambda response: response.strip().lower() == SENTENCE_TO_REPEAT,
    "repeat:repeat_span": repeat_span,
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
    "custom:european_capitals_sort": lambda response: re.sub(r"(?<!\s)\s*,[\s,]*", ", ", plain(response)).strip(", \n") == CAPITALS,
    "custom:csv_city": lambda response: is_csv(response, CITIES, 7),
    # A field in double quotes contains a special character.
    "custom:csv_special_character": lambda response: (
        any(re.search(r"[^\w\s]", field) for field in QUOTED.findall(response)) and is_csv(response, PRODUCTS, 14)
    ),
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": lambda response: all(is_of_napoleon(day.strip()) for day in response.strip().split(",")),
}
