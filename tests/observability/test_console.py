import io
import math
from pathlib import Path

import pytest

from roll_lite.observability.console import HEADER_EVERY, RunConsole
from roll_lite.observability.health import Finding
from roll_lite.observability.report import held_out_change

DOMAINS = ["add", "make", "repeat"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metrics(domains: list[str] = DOMAINS) -> dict[str, float]:
    """A step: 0.61 and 65% overall, by domain 0.10 and 10%, 0.20 and 20%, ..."""
    values = {"reward/mean": 0.61, "reward/accuracy": 0.65, "rollout/tokens_per_second": 5432.0}
    for number, domain in enumerate(domains, 1):
        values |= {f"domain/{domain}/reward/mean": number / 10, f"domain/{domain}/reward/accuracy": number / 10}
    times = {"sync_weights": 0.1, "generate": 1.25, "log_probs": 0.3, "advantages": 0.02, "train": 12.5, "train/actor": 9.0, "other": 0.05}
    return values | {f"time/{phase}": seconds for phase, seconds in times.items()} | {"time/step": 14.25}


def validation(share: float) -> dict[str, float]:
    values = {"validation/reward": share, "validation/accuracy": share}
    for domain in DOMAINS:
        values |= {f"domain/{domain}/validation/reward": share, f"domain/{domain}/validation/accuracy": share}
    return values


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_one_step_is_one_line_of_at_most_100_columns() -> None:
    stream = io.StringIO()
    console = RunConsole(DOMAINS, 40, stream)
    console.step(12, metrics())
    titles, units, step = lines(stream)
    assert titles.split() == ["all", *DOMAINS, "tok/s", "step", "sync", "gen", "logp", "adv", "train"]
    assert step.split() == (
        ["12/40", "0.61", "65%", "0.10", "10%", "0.20", "20%", "0.30", "30%", "5.4k", "14.2", "0.10", "1.25", "0.30", "0.02", "12.5"]
    )
    assert len(step) <= 100 and len(units) <= 100
    for title, value in zip(["repeat", "gen", "train"], ["0.30  30%", "1.25", "12.5"], strict=True):
        assert titles.index(title) + len(title) == step.index(value) + len(value), "columns are aligned"


def test_no_escape_codes_without_a_terminal_and_colours_with_one() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        RunConsole(DOMAINS, 40, stream, width=100).step(1, metrics())
    assert "\x1b" not in plain.getvalue()


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_colours_unless_it_refuses(colours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    RunConsole(DOMAINS, 40, stream, width=100).step(1, metrics())
    assert ("\x1b[31m" in stream.getvalue()) is colours, "10% is red"


def test_the_header_comes_again() -> None:
    stream = io.StringIO()
    console = RunConsole(DOMAINS, 100, stream)
    for step in range(1, 2 * HEADER_EVERY + 1):
        console.step(step, metrics())
    assert sum("tok/s" in line for line in lines(stream)) == 2
    assert len(lines(stream)) == 2 * HEADER_EVERY + 4


def test_a_phase_that_appears_later_gets_its_column() -> None:
    stream = io.StringIO()
    console = RunConsole(["add"], 100, stream)
    console.step(1, metrics(["add"]))
    console.step(2, metrics(["add"]) | {"time/checkpoint": 2.0})
    console.step(3, metrics(["add"]))
    header, steps = [line for line in lines(stream) if "tok/s" in line], [line for line in lines(stream) if "/100" in line]
    assert "save" not in header[0] and header[1].endswith("save") and len(header) == 2
    assert steps[1].endswith("2.00") and steps[2].endswith("-")


def test_validation_stands_in_the_columns_of_the_steps() -> None:
    stream = io.StringIO()
    console = RunConsole(DOMAINS, 40, stream)
    console.validation(0, validation(0.25))
    console.step(1, metrics())
    console.validation(1, validation(0.5))
    sentence, *_, step, held_out = lines(stream)
    assert sentence == "held-out accuracy before training: all 25%, add 25%, make 25%, repeat 25%"
    assert held_out.split() == ["held-out", *["0.50", "50%"] * 4]
    assert held_out.rindex("50%") == step.index("30%")


def test_a_validation_of_a_step_that_is_past_says_so() -> None:
    stream = io.StringIO()
    console = RunConsole(DOMAINS, 40, stream)
    console.step(1, metrics())
    console.validation(0, validation(0.25))
    console.step(2, metrics())
    console.validation(1, validation(0.5))
    *_, before, _, held_out = lines(stream)
    assert before == "held-out accuracy before training: all 25%, add 25%, make 25%, repeat 25%"
    assert held_out == "held-out accuracy at step 1: all 50%, add 50%, make 50%, repeat 50%"


def test_of_what_several_samples_are_worth_the_most_is_shown() -> None:
    stream = io.StringIO()
    console = RunConsole(DOMAINS, 40, stream)
    several = {}
    for prefix in ("", *(f"domain/{name}/" for name in DOMAINS)):
        several |= {f"{prefix}validation/{name}": share for name, share in [("pass@2", 0.6), ("pass@16", 0.9), ("best@16", 0.95)]}
    several |= {"validation/maj@16": 0.4, "domain/add/validation/maj@16": 0.4}
    console.validation(0, validation(0.25) | several)
    console.step(1, metrics())
    console.validation(1, validation(0.5) | several)
    assert lines(stream)[1:3] == [
        "held-out pass@16 before training: all 90%, add 90%, make 90%, repeat 90%",
        "held-out maj@16 before training: all 40%, add 40%, make -, repeat -",
    ]
    assert [line.split() for line in lines(stream)[-2:]] == [["pass@16", *["0.95", "90%"] * 4], ["maj@16", *["-", "40%"] * 2, *["-"] * 4]]
    before, after = ({"validation/pass@2": two, "validation/pass@16": all_16} for two, all_16 in ((0.6, 0.9), (0.7, 1.0)))
    console.finish(held_out_change(validation(0.25) | before, after), [])
    assert ["pass@16", "90.0%", "100.0%", "+10.0"] in [line.split() for line in lines(stream)]
    assert "pass@2 " not in stream.getvalue()


def test_many_domains_take_more_lines_and_none_is_too_long() -> None:
    stream = io.StringIO()
    domains = ["competition_math", *(f"domain{number}" for number in range(11))]
    RunConsole(domains, 1000, stream).step(1, metrics(domains))
    assert all(len(line) <= 100 for line in lines(stream))
    assert "competiti…" in stream.getvalue() and "domain10" in stream.getvalue() and "5.4k" in lines(stream)[-1]


def test_what_was_not_measured_is_a_dash() -> None:
    stream = io.StringIO()
    RunConsole(["add"], 3, stream).step(1, {"reward/mean": math.nan})
    assert lines(stream)[-1].split() == ["1/3", "-", "-", "-", "-", "-", "-"]


def test_the_table_at_the_end() -> None:
    stream = io.StringIO()
    after = validation(0.75) | {"domain/make/validation/accuracy": 0.2}
    change = held_out_change(validation(0.25), after)
    console = RunConsole(DOMAINS, 40, stream)
    console.finish(change, [Finding("truncated", "cut at max_tokens", 3, 5)])
    console.closing_line(40, 0, 134.0, Path("runs/demo"))
    rows = {line.split()[0]: line.split()[1:] for line in lines(stream) if "%" in line}
    assert rows == {
        "add": ["25.0%", "75.0%", "+50.0"],
        "make": ["25.0%", "20.0%", "-5.0"],
        "repeat": ["25.0%", "75.0%", "+50.0"],
        "overall": ["25.0%", "75.0%", "+50.0"],
    }
    assert lines(stream)[-2:] == [
        "warning, 5 step(s) from step 3 on: cut at max_tokens",
        "40 steps in 2 min 14 s; everything is in runs/demo",
    ]


@pytest.mark.parametrize(("after", "shown"), [(0.25, "+0.0"), (0.2504, "+0.0"), (0.2496, "+0.0"), (0.3, "+5.0"), (0.2, "-5.0")])
def test_a_change_too_small_to_show_has_no_minus(after: float, shown: str) -> None:
    stream = io.StringIO()
    RunConsole(["add"], 40, stream).finish(held_out_change(validation(0.25), validation(after)), [])
    (row,) = [line for line in stream.getvalue().splitlines() if "add" in line]
    assert row.split()[-1] == shown


def test_a_run_without_validation_has_a_closing_line() -> None:
    stream = io.StringIO()
    console = RunConsole(["add"], 40, stream)
    console.finish(held_out_change({}, {}), [])
    console.closing_line(12, 10, 4.0, Path("runs/demo"))
    assert lines(stream) == ["steps 11 to 12 in 4.0 s; everything is in runs/demo"]


def test_the_table_without_a_second_validation() -> None:
    stream = io.StringIO()
    RunConsole(["add"], 40, stream).finish(held_out_change(validation(0.25), {}), [])
    assert any(line.split() == ["add", "25.0%", "-", "-"] for line in lines(stream))


def test_messages_are_shown_as_they_are() -> None:
    stream = io.StringIO()
    RunConsole(["add"], 40, stream).message("domain [add]: 1 of 3 :smile: " + "x" * 200)
    assert lines(stream) == ["domain [add]: 1 of 3 :smile: " + "x" * 200]


def test_progress_is_one_line_in_a_terminal_that_is_gone_afterwards() -> None:
    stream = Terminal()
    console = RunConsole(DOMAINS, 40, stream, width=40)
    with console.watching():
        console.progress("step 3", {"add": (40, 38, 96), "make": (0, 0, 96)})
        console.progress("step 3", {"add": (96, 96, 96), "make": (12, 3, 96)})
        console.message("a worker died")
        console.progress("step 3", {"add": (96, 96, 96), "make": (96, 90, 96)})
    first, second, rest = stream.getvalue().split("\r\x1b[2K", 3)[1:]
    assert first == "step 3: add 40/96 (38 scored), make 0/…" and len(first) == 39 and second.startswith("step 3: add 96/96 (96 scored)")
    assert rest.startswith("a worker died") and rest.endswith("\r\x1b[2K") and rest.count("\r\x1b[2K") == 2


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = RunConsole(DOMAINS, 40, stream)
    now = 100.0
    monkeypatch.setattr(console, "_clock", lambda: now)
    for _ in range(2):
        with console.watching():
            for _ in range(25):
                now += 1.0
                console.progress("step 3", {"add": (int(now), 0, 900)})
    assert lines(stream) == [f"step 3: add {second}/900 (0 scored)" for second in (110, 120, 135, 145)]
    assert "\x1b" not in stream.getvalue()


def test_nobody_reads_the_progress() -> None:
    class Gone(Terminal):
        def write(self, _: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise OSError

    console = RunConsole(DOMAINS, 40, Gone())
    with console.watching():
        console.progress("step 3", {"add": (1, 0, 9)})
        console.progress("step 3", {"add": (2, 0, 9)})
