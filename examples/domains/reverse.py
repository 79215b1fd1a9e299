"""A reward domain of your own: the response has to be a word spelled backwards.

A reward is a function. It takes the sample (prompt, response, answer, the other columns of the data's row, finish reason) and returns a
number, a bool, a Score or a dict {value, correct, details}; `async def` works too. Its further parameters are set in the YAML:

    reward:
      name: roll_lite.examples.domains.reverse.score  # yours: importable from where the run is started, or from PYTHONPATH
      args: {partial_credit: 0.5}

`words.yaml` beside this file is the whole configuration, `words_train.jsonl` the data; docs/add_a_domain.md explains both.
Where a sample cannot be scored, raise an exception: it is tried again, then reported as failed, and never trains as a zero.
"""

from roll_lite.data.samples import RewardInput


def score(sample: RewardInput, partial_credit: float = 0.0) -> float:
    """1 for the reversed word; a wrong answer earns partial_credit times the share of letters in their right place."""
    wanted = sample.columns["word"][::-1]
    given = sample.response.strip()
    if given == wanted:
        return 1.0
    matches = sum(a == b for a, b in zip(wanted, given, strict=False))
    return partial_credit * matches / max(len(wanted), len(given))
