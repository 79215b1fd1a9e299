"""Audits the ledger of a run: every prompt, turn, sample and update appears exactly once, or with its cause.

    python examples/audit.py runs/latest

Needs nothing but Python. A resumed run is audited with the runs before it, up to the checkpoint that it continues; steps that were repeated
after it are counted once. The exit code is 0 if the ledger adds up, 1 if not, 2 if there is none. docs/ledger.md describes the lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

LEDGER = "ledger.jsonl"
ENDS = ("delivered", "filtered", "failed", "stale", "dropped")
FINAL = ENDS[:3]
"""Ends that use up a prompt; after the others it starts again."""
SHOWN = 20
Line = dict[str, Any]
Name = tuple[int, int]
"""Group and index of a sample."""


@dataclass
class History:
    """Lines that count, and what was found while they were put together."""

    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = True
    """False if an earlier run of the chain has no ledger."""


def read(path: Path, problems: list[str]) -> Iterator[Line]:
    """Lines of a ledger. A process that was killed may leave half a line: at the end, or before the line of a new start."""
    texts = path.read_bytes().split(b"\n")
    torn = None
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            line["event"]
        except (ValueError, KeyError, TypeError):
            if torn is not None:
                problems.append(f"{path}, line {torn} is damaged")
            torn = number
            continue
        if torn is not None and line["event"] != "start":
            problems.append(f"{path}, line {torn} is damaged")
        torn = None
        yield line
    if torn is not None and texts[-1] == b"":
        problems.append(f"{path}, line {torn} is damaged")


def history_of(run: Path, seen: tuple[Path, ...] = ()) -> History:
    """Follow the chain of checkpoints, and leave out what happened after each."""
    history = History()
    for line in read(run / LEDGER, history.problems):
        if line["event"] == "start":
            if line["resumed_from"] is None:
                history.lines.clear()  # started anew
            else:
                go_back(history, run, run / line["resumed_from"], line["step"], seen)
        elif line["event"] == "restart":  # the step in progress is repeated with its batch
            made = ("masked", "update")
            history.lines = [one for one in history.lines if one["event"] not in made or one["step"] <= line["step"]]
        history.lines.append(line)
    return history


def go_back(history: History, run: Path, other: Path, step: int, seen: tuple[Path, ...]) -> None:
    """Make `history` that of the run `other`, which may be the same one, up to a step."""
    other = other.resolve()
    if other == run and not history.lines:
        history.whole = False
        history.notes.append(f"goes on from step {step} in another folder: what was done before is not audited")
        return
    if other != run:
        if not other.exists():
            other = run.parent / other.name  # the runs were moved together
        if not (other / LEDGER).is_file() or other in seen:
            history.lines, history.whole = [], False
            history.notes.append(f"{other} has no ledger: what it did before step {step} is not audited")
            return
        earlier = history_of(other, (*seen, run))
        history.lines, history.whole = earlier.lines, earlier.whole
        history.problems += earlier.problems
        history.notes += earlier.notes
    ends = [place for place, line in enumerate(history.lines) if line["event"] == "step" and line["step"] == step]
    if not ends:
        if history.whole:
            history.problems.append(f"a run goes on from step {step} of {other}, which the ledger there does not have")
        history.lines, history.whole = [], False
        return
    again = {line["step"] for line in history.lines[ends[-1] + 1 :] if line["event"] == "step"}
    history.notes.append(f"goes on from step {step} of {other}" + (f"; {len(again)} later step(s) there do not count" if again else ""))
    del history.lines[ends[-1] + 1 :]


class Audit:
    def __init__(self, history: History) -> None:
        self.problems = list(history.problems)
        self.whole = history.whole
        self.start: Line = {}
        self.groups: dict[int, Line] = {}
        self.open: set[int] = set()
        self.put_back: list[tuple[Line, int]] = []
        """Stale and dropped groups, each with a number: new prompts of later groups of its domain started after it was put back."""
        self.not_counted: list[Line] = []
        """Stale and dropped groups since the last batch."""
        self.before_drop: dict[str, int] = {}
        """Highest group number, by domain, before the last checkpoint that is continued."""
        self.highest: dict[str, int] = defaultdict(int)
        self.next_group: int | None = 0 if history.whole else None
        self.ended = False
        self.delivered: dict[int, set[Name]] = defaultdict(set)
        """Accepted samples by step."""
        self.domain_of: dict[Name, str] = {}
        self.masked: dict[int, dict[Name, str]] = defaultdict(dict)
        self.updates: dict[int, list[Line]] = defaultdict(list)
        self.step_of: dict[Name, int] = {}
        """Step in which a sample trained."""
        self.batches: dict[int, Line] = {}
        self.steps: dict[int, int] = {}
        """Weight version after each step."""
        self.lags: Counter[int] = Counter()
        self.wanted: Counter[str] = Counter()
        self.mixes = False
        """True while the shares are those of the configuration, so that they can be checked."""
        self.slack = 1 if history.whole else 2
        self.total: dict[str, Counter[str]] = defaultdict(Counter)
        self.causes: Counter[str] = Counter()
        for line in history.lines:
            reader = getattr(self, f"on_{line['event']}", None)
            if reader is None:
                self.problem(f"unknown event {line['event']!r}")
            else:
                reader(line)
        self.at_the_end()

    def problem(self, text: str) -> None:
        self.problems.append(text)

    # ---------------------------------------------------------------- events

    def on_start(self, line: Line) -> None:
        names = {name: domain["share"] for name, domain in line["domains"].items()}
        if names != {name: domain["share"] for name, domain in self.start.get("domains", {}).items()}:
            self.wanted.clear()  # the mix counts anew
            self.mixes = True
        if self.steps and self.steps[max(self.steps)] != line["version"]:
            self.problem(f"the run goes on with version {line['version']} after version {self.steps[max(self.steps)]}")
        self.start, self.ended = line, False

    def on_restart(self, line: Line) -> None:
        self.total[""]["restarts of training ranks"] += 1

    def on_group(self, line: Line) -> None:
        number, domain, end = line["group"], line["domain"], line["end"]
        if number in self.groups:
            self.problem(f"group {number} ended twice: {self.groups[number]['end']} and {end}")
            return
        if end not in ENDS:
            self.problem(f"group {number} ended as {end!r}, which is no end")
        if end != "delivered" and not line.get("cause"):
            self.problem(f"group {number} of {domain} was lost without a cause ({end})")
        self.groups[number] = line
        self.open.discard(number)
        self.highest[domain] = max(self.highest[domain], number)
        if end not in FINAL:
            self.not_counted.append(line)
        if end == "dropped":
            self.before_drop[domain] = self.highest[domain]
        total = self.total[domain]
        total[end] += 1
        if end != "delivered":
            self.causes[f"{domain}: group {end}: {line.get('cause')}"] += 1
        failed = {int(index): cause for index, cause in line.get("failed", {}).items()}
        for index, turns in enumerate(line.get("turns", [])):
            total["samples"] += 1
            total["turns"] += len(turns)
            self.sample(line, index, turns, failed)

    def sample(self, line: Line, index: int, turns: list[list[Any]], failed: dict[int, str]) -> None:
        number, domain = line["group"], line["domain"]
        name = f"sample {index} of group {number} ({domain})"
        if index in failed:
            if not failed[index]:
                self.problem(f"{name} failed without a cause")
            self.total[domain]["failed samples"] += 1
            self.causes[f"{domain}: sample failed: {failed[index]}"] += 1
            return
        if not turns:
            self.problem(f"{name} was lost without a cause: it has no turn and did not fail")
        if line["scores"][index] is None:
            self.problem(f"{name} has no score and did not fail")
        if line["end"] == "delivered" and index != line.get("baseline") and line.get("step") is not None:
            self.delivered[line["step"]].add((number, index))
            self.domain_of[number, index] = domain

    def on_batch(self, line: Line) -> None:
        step = line["step"]
        if step in self.batches:
            self.problem(f"step {step} has two batches")
        self.batches[step] = line
        for lost in self.not_counted:
            self.put_back.append((lost, line["admitted"] if lost["end"] == "stale" else self.before_drop[lost["domain"]] + 1))
        self.not_counted.clear()
        self.watermark(line, f"when the batch of step {step} was complete")
        mine = [group for group in self.groups.values() if group["end"] == "delivered" and group.get("step") == step]
        self.check_versions(line, mine)
        self.check_shares(line, Counter(group["domain"] for group in mine))

    def watermark(self, line: Line, when: str) -> None:
        """Every group admitted so far has ended, or is in flight. Without the earlier ledger this is known from the first batch on."""
        first = line["admitted"] if self.next_group is None else self.next_group
        flying = set(line["open"])
        for number in sorted({*range(first, line["admitted"]), *self.open}):
            if number not in self.groups and number not in flying:
                self.problem(f"group {number} was lost without a cause: {when} it was neither in flight nor at an end")
        for number in sorted(flying & self.groups.keys()):
            self.problem(f"group {number} is in flight {when}, but has ended: {self.groups[number]['end']}")
        self.next_group = max(first, line["admitted"])
        self.open = flying

    def check_versions(self, batch: Line, groups: list[Line]) -> None:
        bound, version, step = self.start["max_staleness"], batch["version"], batch["step"]
        for line in groups:
            if step - line["asked"] > bound:
                self.problem(f"group {line['group']} was admitted for batch {line['asked']} and trains in {step}; max_staleness is {bound}")
            for index, turns in enumerate(line["turns"]):
                for number, (_, first, last) in enumerate(turns):
                    assert first is not None and last is not None
                    self.lags[version - first] += 1
                    if not version - bound <= first <= version or not version - bound <= last <= version:
                        self.problem(
                            f"turn {number} of sample {index} of group {line['group']} has versions {first} to {last}, beyond the bound: "
                            f"step {step} trains version {version}, and max_staleness is {bound}"
                        )

    def check_shares(self, batch: Line, delivered: Counter[str]) -> None:
        step, domains = batch["step"], self.start["domains"]
        for name in {*delivered, *batch["wanted"]}:
            wanted, found = batch["wanted"].get(name, 0), delivered[name]
            may_be_short = self.start["short_batches"] or name not in batch["shares"]
            if found > wanted or (found < wanted and not may_be_short):
                self.problem(f"step {step}: share off: {found} groups of {name} instead of {wanted}")
            if name in batch["shares"] and wanted < domains[name]["least"]:
                self.problem(f"step {step}: share off: {wanted} groups of {name}, min_prompts is {domains[name]['least']}")
        # Exact shares cannot be expected of a mix with minimums, or after a domain was used up.
        self.mixes = self.mixes and len(batch["shares"]) == len(domains) and not any(one["least"] for one in domains.values())
        self.wanted.update(batch["wanted"])
        if not self.mixes:
            return
        weights = {name: Fraction(str(one["share"])) for name, one in domains.items()}
        places = sum(self.wanted.values())
        for name, weight in weights.items():
            due = weight / sum(weights.values()) * places
            if abs(self.wanted[name] - due) >= self.slack:
                self.problem(
                    f"step {step}: share off: {self.wanted[name]} of {places} groups so far are of {name}, promised are {float(due):.1f}"
                )

    def on_masked(self, line: Line) -> None:
        for cause, groups in line["samples"].items():
            for name in names_of(groups):
                earlier = self.masked[line["step"]].get(name)
                self.masked[line["step"]][name] = cause if earlier is None else f"{earlier}, {cause}"

    def on_update(self, line: Line) -> None:
        self.updates[line["step"]].append(line)
        self.total[""]["updates"] += 1
        for role, outcome in line["roles"].items():
            self.total[""][f"{role} {outcome}"] += 1

    def on_step(self, line: Line) -> None:
        step, version = line["step"], line["version"]
        if step in self.steps:
            self.problem(f"step {step} was made twice")
        if self.steps and step != max(self.steps) + 1:
            self.problem(f"step {step} follows step {max(self.steps)}")
        before = self.steps.get(step - 1, self.start["version"])
        updated = any("actor" in update["roles"] for update in self.updates[step])
        if version != before + updated:
            self.problem(f"step {step} made version {version} of version {before}, {'with' if updated else 'without'} updates of the actor")
        if step in self.batches and self.batches[step]["version"] != before:
            self.problem(f"step {step}: the engines had version {self.batches[step]['version']}, the trainer {before}")
        self.steps[step] = version
        self.check_training(step)

    def on_end(self, line: Line) -> None:
        self.watermark(line, "at the run's end")
        self.ended = True

    # ---------------------------------------------------------------- what trained

    def check_training(self, step: int) -> None:
        """Every accepted sample trains once per pass, in one step only, or is masked."""
        masked = self.masked[step]
        passes: dict[int, Counter[Name]] = defaultdict(Counter)
        for number, update in enumerate(self.updates[step], 1):
            if update["update"] != number:
                self.problem(f"step {step}: update {update['update']} stands where update {number} is due")
            passes[update["epoch"]].update(names_of(update["samples"]))
        trained = {name for counts in passes.values() for name in counts}
        for epoch, counts in passes.items():
            for name in sorted(name for name, count in counts.items() if count > 1):
                self.problem(f"step {step}: {text_of(name)} trained twice: {counts[name]} times in pass {epoch}")
        for name in sorted(trained):
            if name in self.step_of:
                self.problem(f"{text_of(name)} trained twice: in step {self.step_of[name]} and in step {step}")
            self.step_of[name] = step
            if name in masked:
                self.problem(f"step {step}: {text_of(name)} is masked ({masked[name]}) and trained")
            elif step in self.batches and name not in self.delivered[step]:
                self.problem(f"step {step}: {text_of(name)} trained without having been delivered and accepted")
        if step not in self.batches:
            if not self.start["replays"]:
                self.problem(f"step {step} has no batch")
            return
        for name in sorted(self.delivered[step]):
            total = self.total[self.domain_of[name]]
            total["accepted"] += 1
            if name in masked:
                total["masked"] += 1
                self.causes[f"{self.domain_of[name]}: sample masked: {masked[name]}"] += 1
            elif self.start["trains"]:
                total["trained"] += name in trained
                for epoch in range(1, self.start["ppo_epochs"] + 1):
                    if name not in passes[epoch]:
                        self.problem(f"step {step}: {text_of(name)} is missing in the mini-batches of pass {epoch}, without a cause")

    def at_the_end(self) -> None:
        used: dict[tuple[str, int, int], int] = {}
        epochs: dict[tuple[str, int], set[int]] = defaultdict(set)
        for number, line in sorted(self.groups.items()):
            prompt = line["domain"], line["epoch"], line["prompt"]
            epochs[line["domain"], line["prompt"]].add(line["epoch"])
            if prompt in used:
                self.problem(
                    f"prompt {prompt[2]} of {prompt[0]} was used twice in epoch {prompt[1]}: by groups {used[prompt]} and {number}"
                )
            elif line["end"] in FINAL:
                used[prompt] = number
            earlier = self.groups.get(line.get("continues", -1))
            if earlier is not None and (earlier["end"], earlier["prompt"]) != ("dropped", line["prompt"]):
                self.problem(f"group {number} continues group {earlier['group']}, which was not dropped, or had another prompt")
        self.check_restarts()
        if self.ended and self.whole:
            for (domain, prompt_number), seen in sorted(epochs.items()):
                for epoch in sorted(set(range(max(seen))) - seen):
                    self.problem(f"prompt {prompt_number} of {domain} was lost without a cause: it never came in epoch {epoch}")

    def check_restarts(self) -> None:
        """Prompts that were put back start again before any new prompt of their domain."""
        starts: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for number, line in sorted(self.groups.items()):
            starts[line["domain"], line["epoch"], line["prompt"]].append(number)
        new: dict[str, list[int]] = defaultdict(list)
        for (domain, *_), numbers in starts.items():
            new[domain].append(numbers[0])
        for line, after in self.put_back:
            number, domain = line["group"], line["domain"]
            first = min((one for one in new[domain] if one >= after), default=None)
            again = min((one for one in starts[domain, line["epoch"], line["prompt"]] if one > number), default=None)
            if first is None or (again is not None and again < first):
                continue
            if all(one in self.groups for one in range(number + 1, first)):  # otherwise one that is in flight may have started it
                self.problem(
                    f"prompt {line['prompt']} of {domain} was lost without a cause: group {number} was {line['end']}, and group {first} "
                    "started a new prompt, though that one had not started again"
                )

    # ---------------------------------------------------------------- the table

    def table(self) -> str:
        columns = [*ENDS, "samples", "turns", "failed samples", "accepted", "masked", "trained"]
        delivered = sum(total["delivered"] for total in self.total.values())
        shares = {name: one["share"] for name, one in self.start["domains"].items()}
        rows = [["domain", "promised", "share", *columns]]
        for name, share in shares.items():
            total = self.total[name]
            rows.append(
                [
                    name,
                    f"{share / sum(shares.values()):.3f}",
                    f"{total['delivered'] / max(1, delivered):.3f}",
                    *(str(total[one]) for one in columns),
                ]
            )
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        updates = ", ".join(f"{count} {what}" for what, count in sorted(self.total[""].items()))
        lines.append(f"\nsteps: {len(self.steps)}; {updates or 'no updates'}")
        lags = ", ".join(f"{count} by {lag}" for lag, count in sorted(self.lags.items()))
        lines.append(f"turns behind the trained version (at most {self.start['max_staleness']}): {lags or 'none'}")
        lines += [f"{count} x {cause}" for cause, count in self.causes.most_common(SHOWN)]
        unfinished = sorted(step for step in self.batches if step not in self.steps)
        if unfinished:
            lines.append(
                f"step {unfinished[0]} was cut off: its batch of {len(self.delivered[unfinished[0]])} samples was not, or partly, trained"
            )
        if not self.ended:
            lines.append(f"the run goes on, or was killed: {len(self.open)} groups known to be in flight")
        return "\n".join(lines)


def names_of(groups: dict[str, list[int]]) -> Iterator[Name]:
    for group, indices in groups.items():
        for index in indices:
            yield int(group), index


def text_of(name: Name) -> str:
    return f"sample {name[1]} of group {name[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, runs/latest for instance")
    run = parser.parse_args().run.resolve()
    if not (run / LEDGER).is_file():
        parser.error(f"{run} has no {LEDGER}")
    history = history_of(run)
    if not any(line["event"] == "start" for line in history.lines):
        parser.error(f"{run / LEDGER} has no line of a start")
    audit = Audit(history)
    for note in history.notes:
        print(note)
    print(audit.table())
    for problem in audit.problems[:SHOWN]:
        print(f"VIOLATION: {problem}")
    if len(audit.problems) > SHOWN:
        print(f"VIOLATION: and {len(audit.problems) - SHOWN} more")
    if not audit.problems:
        print("the ledger adds up")
    return 1 if audit.problems else 0


if __name__ == "__main__":
    sys.exit(main())
