"""Command line of `roll-lite`. Heavy modules are imported after the configuration is checked."""

from __future__ import annotations

import argparse
import errno
import io
import json
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from roll_lite.config.arithmetic import derive
from roll_lite.config.arithmetic_tables import render
from roll_lite.config.checks.across import Check, simulated_domains
from roll_lite.config.checks.gpu_only import needs_gpus
from roll_lite.config.checks.layout import devices_are_there
from roll_lite.config.checks.notes import notes_on
from roll_lite.config.checks.uploads import not_uploaded
from roll_lite.config.compose.layers import compose, find
from roll_lite.config.compose.overrides import COMMAND_LINE, MOST_RUNS, alternatives, parse_override
from roll_lite.config.loading import load_config, located
from roll_lite.config.placement_picture import draw
from roll_lite.config.problems import ConfigError, Missing, Problem, did_you_mean, hidden
from roll_lite.config.schema.base import LATEST, Refused, readable
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.check import check_data
from roll_lite.data.dump_files import check_dumps
from roll_lite.distributed.strategy.build import engine_arguments_fit
from roll_lite.environments.check import check_environments, template_notes
from roll_lite.files import CONFIGS, DOCS, STARTERS, absolute_path, kind_of, read_text
from roll_lite.hub import to_stderr
from roll_lite.observability.run_folder import check_run_dir, check_store
from roll_lite.pipeline.checkpoint_files import check_resumption, resumption_notes
from roll_lite.pipeline.shortages import check_machine
from roll_lite.rewards.registry import check_rewards

PROJECTS = ("roll", "verl", "openrlhf")
WRONG_CONFIGURATION = 2
INTERRUPTED = 130
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
OUTPUT_FAILED = 74
"""Exit code (EX_IOERR) if output cannot be written: full disk, lost terminal."""
CHECKS = (
    check_store,
    check_resumption,
    check_dumps,
    engine_arguments_fit,
    check_data,
    check_rewards,
    partial(check_environments, makes=False),
)
OF_CHECK = (*CHECKS[:-1], check_environments)
"""Checks of `roll-lite check`. Other commands use CHECKS: a run's workers check environments and servers before training."""
OF_MACHINE = (devices_are_there, needs_gpus)
"""Checks of this machine. `roll-lite check` prints failures as notes: the configuration may be for another machine."""
OF_RUNS = (*CHECKS, *OF_MACHINE, check_run_dir, check_machine)
SEEN_ENOUGH = 141
"""Exit code if the output's reader closed the pipe (`| head`): the shell's code for SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    _make_output_usable()
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.stderr.write("the current folder is gone; change to one that exists\n")
        return WRONG_CONFIGURATION
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:  # not an output stream's error
            raise
        code = SEEN_ENOUGH if isinstance(error, BrokenPipeError) else OUTPUT_FAILED  # `| head` has seen enough
        with suppress(OSError):
            if code == OUTPUT_FAILED:
                sys.stderr.write(f"the output cannot be written: {error.strerror}\n")
                sys.stderr.flush()
        with suppress(OSError):  # buffered output would fail at exit
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _make_output_usable() -> None:
    """Redirect closed standard streams to /dev/null; escape characters that stdout cannot encode."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next opened file gets its number
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help()
        return 0
    parsed, rest = parser.parse_known_args(given)
    # argparse accepts positional arguments only in one block; overrides may stand on both sides of an option.
    if (no_configuration := getattr(parsed, "act", None)) is not None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return int(no_configuration(parsed))
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(map(hidden, unknown))}; settings are written key=value, without dashes")
    # Users' rewards are modules in the current folder, which a console script does not search.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    overrides = [*parsed.overrides, *rest]
    try:
        if parsed.command == "evaluate":
            overrides = _evaluation(parsed, overrides)
        if parsed.command == "run" and parsed.multirun:
            return _sweep(parsed, overrides)
        if parsed.command == "submit":
            return _submit(parsed, overrides)
        if parsed.command == "launch":
            return _launch(parsed, overrides)
        imagined = {"simulate": "simulated", "plan": "planned"}.get(parsed.command)
        of_command: dict[str, Sequence[Check]] = {"run": OF_RUNS, "check": OF_CHECK}
        further = (simulated_domains,) if imagined else of_command.get(parsed.command, CHECKS)
        needs_weights = (parsed.command == "run" and not parsed.cfg) or bool(getattr(parsed, "episodes", 0))
        config = _loaded(parsed, overrides, further, files=not imagined, weights=needs_weights)
    except ConfigError as error:
        if parsed.command == "check" and all(isinstance(problem, Missing) for problem in error.problems):
            try:  # again, with missing values allowed and files unchecked
                config = _loaded(parsed, overrides, (), files=False)
            except ConfigError:
                config = error.partial  # the valid part
            sys.stderr.write(_tables(config))
        sys.stderr.write(f"{error}\n")
        return WRONG_CONFIGURATION
    if getattr(parsed, "cfg", None):
        _print(config)
        return 0
    if imagined and config.mode not in ("full", *(["evaluate"] if parsed.command == "plan" else [])):
        sys.stderr.write(f"mode = {config.mode}: whole runs are {imagined}, in which generation and training take turns; use full\n")
        return WRONG_CONFIGURATION
    commands = {"run": _run, "check": _check, "reward": _reward, "simulate": _simulate, "plan": _plan}
    return commands[parsed.command](config, parsed)


def _loaded(parsed: argparse.Namespace, overrides: Sequence[str], further: Sequence[Check], **options: bool) -> RunConfig:
    name, folder = located(parsed.config_name, parsed.config_path)
    return load_config(name, folder, overrides, further=further, tell=to_stderr, **options)


def _print(config: RunConfig) -> None:
    has_all_characters = "utf" in (sys.stdout.encoding or "").lower()
    sys.stdout.write(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=has_all_characters))
    sys.stdout.flush()


def _check(config: RunConfig, _: argparse.Namespace) -> int:
    _print(config)
    sys.stderr.write(_tables(config))
    return 0


def _tables(config: RunConfig) -> str:
    """Return derived values, placement and notes as text. Tables that lack a value are left out."""
    of_machine = [f"{path}: {message}" for one in (*OF_MACHINE, template_notes) for path, message in readable(one(config))]
    parts = []
    for part in (lambda: render(derive(config)) if config.mode != "evaluate" else "", lambda: draw(config)):
        with suppress(Refused):
            parts.append(part())
    parts.append("\n".join(f"note: {note}" for note in [*notes_on(config, resumption_notes), *of_machine]))
    return "".join(f"\n{part}\n" for part in parts if part)


def _evaluation(parsed: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """Rewrite the parsed command `evaluate` as `run` or, with several models, as a sweep. Return the overrides."""
    keys = [text.partition("=") for text in given]
    models = [text for text, (key, sign, _) in zip(given, keys, strict=True) if not sign or isinstance(parse_override(f"{key}=0"), Problem)]
    models = [text for text in models if not text.startswith(("+", "~"))]
    overrides = [text for text in given if text not in models]
    parsed.command, parsed.multirun = "run", len(models) > 1
    domains: dict[str, Any] = {}
    for text in parsed.data:
        is_preset = "/" not in text and not Path(text).suffix
        stem = Path(text.partition("?")[0])  # hf:/owner/name, or a file
        name = text if is_preset else re.sub(r"[^\w-]", "_", (stem.parts[2:] or stem.parts)[0] if stem.parts[0] == "hf:" else stem.stem)
        domains[f"{name}_{len(domains)}" if name in domains else name] = {"data": {"preset" if is_preset else "validation": text}}
    chosen = ["~domains", f"domains={json.dumps(domains)}"] if domains else []
    return ["mode=evaluate", *([f"model.path={','.join(models)}"] if models else []), *chosen, *overrides]


def _sweep(parsed: argparse.Namespace, overrides: Sequence[str]) -> int:
    from roll_lite.pipeline.sweep import Choice, run_each

    values = []
    for text in overrides:
        try:
            given = alternatives(text)
        except ValueError as error:
            raise ConfigError(parsed.config_name, [Problem(text, str(error), source=COMMAND_LINE)]) from None
        values.append(list(map(_fixed, given)))
    if (count := math.prod(map(len, values))) > MOST_RUNS:
        longest = max(values, key=len)[0].partition("=")[0]
        message = f"these are {count:,} runs; at most {MOST_RUNS:,} are started: give {longest} and others fewer values"
        raise ConfigError(parsed.config_name, [Problem("--multirun", message)])
    if count > 1:
        sys.stderr.write(f"checking the configurations of {count} runs\n")
    chosen = list(product(*values))
    choices = [Choice(one, _loaded(parsed, one, OF_RUNS)) for one in chosen]
    if parsed.cfg:
        for choice in choices:
            sys.stdout.write(f"--- # {' '.join(map(hidden, choice.overrides))}\n")
            _print(choice.config)
        return 0
    name, folder = located(parsed.config_name, parsed.config_path)
    command = [sys.executable, "-m", "roll_lite.cli", "run", "--config-name", name, "--config-path", str(folder)]
    return run_each(command, choices)


def _fixed(override: str) -> str:
    """Resolve the link `latest` in a path: the link will point to the next run."""
    key, sign, value = override.partition("=")
    path = Path(value)
    with suppress(ValueError):  # loading tells what is wrong with it
        return f"{key}={path.resolve()}" if sign and LATEST in path.parts and kind_of(path) else override
    return override


def _submit(parsed: argparse.Namespace, overrides: Sequence[str]) -> int:
    try:
        from roll_lite.pipeline.submission import submit
    except ImportError as error:
        sys.stderr.write(f'{error}; pip install "roll_lite[jobs]"\n')
        return WRONG_CONFIGURATION
    name, folder = located(parsed.config_name, parsed.config_path)
    folder = Path.cwd() if folder == CONFIGS else Path(os.path.normpath(folder))
    written = compose(name, folder, overrides)
    of_upload = [*written.problems, *not_uploaded(written.data, folder)]
    config = _loaded(parsed, overrides, (engine_arguments_fit, check_rewards, lambda _: of_upload), files=False)
    command = ["roll-lite", "run", "--config-name", name, "--config-path", str(folder.relative_to(Path.cwd())), *overrides]
    return submit(config, command, parsed.address, parsed.env, parsed.name, parsed.follow)


def _launch(parsed: argparse.Namespace, overrides: Sequence[str]) -> int:
    from roll_lite.launch.render import Launch

    name, folder = located(parsed.config_name, parsed.config_path)
    overrides = list(map(_fixed, overrides))
    written = compose(name, folder, overrides)
    launch = Launch(parsed.target, parsed.config_name, parsed.config_path, overrides, parsed.image, parsed.claim)
    problems = [*written.problems, *(not_uploaded(written.data, folder) if parsed.target == "ray" else ())]
    of_launch = (lambda _: problems, lambda config: launch.mistakes(config, find(name, folder)))
    config = _loaded(parsed, overrides, (engine_arguments_fit, check_rewards, *of_launch), files=False)
    try:
        with parsed.output.open("x", encoding="utf-8") if parsed.output else nullcontext(sys.stdout) as file:
            file.write(launch.render(config))
    except OSError as error:
        if error.filename is None:  # of standard output
            raise
        sys.stderr.write(f"{error}\n")
        return WRONG_CONFIGURATION
    return 0


def _run(config: RunConfig, _: argparse.Namespace) -> int:
    from roll_lite.pipeline.run import run

    return run(config)


def _reward(config: RunConfig, parsed: argparse.Namespace) -> int:
    from roll_lite.rewards.preview import chosen_domain, preview

    if parsed.episodes:
        try:
            from roll_lite.environments.preview import preview_episodes

            return preview_episodes(config, chosen_domain(config, parsed.domain), parsed.split, parsed.episodes)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return WRONG_CONFIGURATION
    responses = absolute_path(parsed.responses) if parsed.responses else None
    return preview(config, parsed.domain, parsed.split, parsed.limit or None, responses, parsed.column)


def _simulate(config: RunConfig, parsed: argparse.Namespace) -> int:
    from roll_lite.simulator.command import answer

    return answer(config, parsed)


def _import(parsed: argparse.Namespace) -> int:
    from roll_lite.config.coming_from.convert import Conversion

    try:
        conversion = Conversion(parsed.project, read_text(parsed.file), str(parsed.file))
        with parsed.out.open("x", encoding="utf-8") if parsed.out else nullcontext(sys.stdout) as file:
            yaml.safe_dump(conversion.config, file, sort_keys=False, allow_unicode=True, default_flow_style=None)
    except (FileExistsError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_CONFIGURATION
    sys.stderr.writelines(f"{problem}\n" for problem in conversion.told)
    return 0


def _plan(config: RunConfig, parsed: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # planning must not take memory of GPUs that others may use
    with warnings.catch_warnings(action="ignore"):  # of Megatron-Core, about packages for GPUs
        from roll_lite.planning.report import answer

        return answer(config, parsed.config_name, parsed)


def _show(parsed: argparse.Namespace) -> int:
    if parsed.command == "view":
        from roll_lite.observability.view.server import serve

        return serve(parsed.runs, parsed.host, parsed.port)
    from roll_lite.observability.view.report import write_reports

    return write_reports(parsed.runs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll-lite", description="Reinforcement learning with verifiable rewards.")
    parser.epilog = "To begin: `roll-lite init` writes a folder that trains at once; `roll-lite docs quick_start` goes through it."
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('roll_lite')}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("run", "train as the configuration says"),
        ("submit", "check the configuration and hand the run to a Ray cluster's job server: it goes on when this machine is closed"),
        ("launch", "check the configuration and write a file that starts its run on a cluster: Slurm, Ray on bare machines, or Kubernetes"),
        ("evaluate", "generate and score held-out prompts with a model, or with several one after the other; nothing trains"),
        ("check", "only check the configuration; print it resolved as YAML, and the batch arithmetic on standard error"),
        ("reward", "score reference answers or given responses with a domain's reward and show them; nothing trains"),
        (
            "simulate",
            "run the schedulers on a virtual clock, with modelled engines: step time, staleness; nothing trains",
        ),
        ("plan", "memory of every role and phase, seconds of a step and its bottleneck, on devices that need not be there; nothing trains"),
    ):
        command = _command(commands, name, help_text)
        default = "evaluate" if name == "evaluate" else None
        help_text = f"a YAML file of yours, name or path, or a shipped one's name{f' (default: {default})' if default else ''}"
        command.add_argument("--config-name", "--config_name", "-cn", required=default is None, default=default, help=help_text)
        command.add_argument(
            "--config-path",
            "--config_path",
            "-cp",
            "--config-dir",
            "-cd",
            type=Path,
            help="a folder of your own in which names are looked up before the shipped ones; the current one where absent",
        )
        if name not in ("reward", "submit", "launch"):
            command.add_argument("--cfg", choices=("job",), help="only print the configuration as it would be run")
        _own_options(command, name)
        help_text = "key=value, +key=value, ~key; values are YAML"
        if name == "evaluate":
            text = "held-out prompts: a preset (roll-lite data list), a file, or hf://owner/name?split=...; may be given several times"
            command.add_argument("--data", action="append", default=[], metavar="SET", help=text)
            help_text = f"models, each a folder or its name on the hub, and {help_text}"
        command.add_argument("overrides", nargs="*", help=help_text)
    _further_commands(commands)
    return parser


def _command(commands: Any, name: str, text: str, **defaults: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(**defaults)
    return command


def _own_options(command: argparse.ArgumentParser, name: str) -> None:
    match name:
        case "launch":
            command.add_argument("target", choices=("slurm", "ray", "k8s"), help="Slurm, Ray on bare machines, or KubeRay")
            command.add_argument("--image", help="k8s: the image of the pods, with roll_lite in it")
            text = "k8s: the volume claim that pods mount at /shared (default: %(default)s)"
            command.add_argument("--claim", default="shared", help=text)
            command.add_argument("--output", type=Path, metavar="FILE", help="a new file, in place of standard output")
        case "reward":
            command.add_argument("--domain", help="the domain; may be left out where the configuration has one")
            command.add_argument("--split", choices=("train", "validation"), default="train", help="which prompts (default: %(default)s)")
            command.add_argument("--limit", type=_number(0), default=20, help="how many samples; 0 for all (default: %(default)s)")
            source = command.add_mutually_exclusive_group()
            text = (
                "score these in place of the reference answers: a .jsonl file with `response` and `prompt_uid` or `prompt` in every line, "
                "or the samples of a run, runs/NAME/samples/step_000001.jsonl"
            )
            source.add_argument("--responses", type=Path, help=text)
            text = "play N episodes of a domain with an environment, with the model, and show them"
            command.add_argument("--episodes", type=_number(1), metavar="N", help=text)
            source.add_argument("--column", help="take the responses from this column of the domain's data")
        case "submit":
            address = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
            command.add_argument("--address", default=address, help="the dashboard of the cluster's head node (default: %(default)s)")
            command.add_argument("--follow", action="store_true", help="show the run's output until it ends; Ctrl-C leaves the run alone")
            command.add_argument("--name", metavar="ID", help="the job's id (default: made by Ray)")
            text = "pass this environment variable on, for instance WANDB_API_KEY; may be given several times"
            command.add_argument("--env", type=_variable, action="append", default=[], metavar="NAME", help=text)
        case "simulate":
            text = "a run's folder, whose metrics and samples take the place of the assumptions in `simulation`"
            command.add_argument("--from", dest="measured", type=Path, metavar="RUN_FOLDER", help=text)
            text = "other policies, and half and twice as many engines, in the same table"
            command.add_argument("--compare", action="store_true", help=text)
            command.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the engines over time")
            text = "what colours mean in it (default: %(default)s)"
            command.add_argument("--color", choices=("version", "domain"), default="version", help=text)
        case "plan":
            devices = ("A100", "H100", "H200", "B200", "MI300X")
            command.add_argument("--device", choices=devices, default="H100", help="the kind of device (default: %(default)s)")
            command.add_argument("--model", help="a folder with config.json, or a name of the hub, if model.path is not here")
            command.add_argument("--search", type=_number(1), metavar="N", help="try layouts on N devices and list the fastest that fit")
            command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        case "run":
            text = "one run for every combination of key=a,b settings, one after the other, and a table at the end"
            command.add_argument("-m", "--multirun", action="store_true", help=text)


def _further_commands(commands: Any) -> None:
    command = _command(commands, "init", "write a folder to start from: configuration, data, reward function, README", act=_init)
    recipes = sorted(path.name for path in STARTERS.iterdir())
    command.add_argument("recipe", nargs="?", choices=recipes, default="default", help="what to start from (default: %(default)s)")
    command.add_argument("folder", nargs="?", type=Path, default=Path("my_run"), help="a new folder (default: %(default)s)")
    command = _command(commands, "docs", "print a page of the documentation, or list all pages", act=_docs)
    command.add_argument("page", nargs="?", metavar="PAGE", help="its name in the list")
    help_text = "check this machine, or every node of a cluster, and say what to do: versions, GPUs, engines, Ray, limits, sandbox, clock"
    command = _command(commands, "doctor", help_text, act=_doctor)
    for option, text in (
        ("--engines", "start each installed engine on the shipped tiny model too (on two CPU cores minutes each)"),
        ("--smoke", "train two steps of the tiny model with each engine too (on two CPU cores minutes each)"),
        ("--nodes", "check every node of a Ray cluster instead, and the bandwidth between them"),
        ("--json", "print JSON"),
    ):
        command.add_argument(option, action="store_true", help=text)
    text = "the cluster, host:port or auto (default: RAY_ADDRESS; with --nodes auto)"
    command.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help=text)
    command = _command(commands, "data", "list and show presets of public data sets, and write their rows to files", act=_data)
    actions = command.add_subparsers(dest="action", required=True)
    _command(actions, "list", "all presets, in a line each")
    for name, help_text in (
        ("show", "where a preset's rows come from, its columns, and the settings of its domain"),
        ("prepare", "write a preset's rows as JSON lines, in the columns that a domain reads, and tell what was left out"),
    ):
        action = _command(actions, name, help_text)
        action.add_argument("preset", metavar="NAME", help="the preset's name in the list")
    action.add_argument("--split", choices=("train", "validation"), default="train", help="which rows (default: %(default)s)")
    action.add_argument("--from", dest="source", metavar="FILE", help="a file in the data set's own columns, in place of the hub's files")
    action.add_argument("--out", type=Path, metavar="FILE", help="a new file (default: NAME_SPLIT.jsonl)")
    help_text = "turn another trainer's configuration into one of ours, and list what has no counterpart"
    command = _command(commands, "import", help_text, act=_import)
    command.add_argument("project", choices=PROJECTS, help="the other trainer")
    command.add_argument("file", type=Path, help="its YAML file, or the script or command line that starts it")
    command.add_argument("--out", type=Path, help="a new file for the configuration, in place of standard output")
    for name, default, help_text in (
        ("view", "runs", "show runs in a web page of this machine, live: curves, samples, tokens, timelines, settings"),
        ("report", "runs/latest", "write a run as one HTML file, report.html in its folder"),
    ):
        command = _command(commands, name, help_text, act=_show)
        text = f"a run's folder, or one that holds runs (default: {default})"
        command.add_argument("runs", nargs="*", type=Path, metavar="RUN", default=[Path(default)], help=text)
        if name == "view":
            command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, for this machine only)")
            command.add_argument("--port", type=_number(0, 65535), default=8700, help="0: any that is free (default: %(default)s)")


def _doctor(parsed: argparse.Namespace) -> int:
    from roll_lite.doctor.command import answer

    return answer(parsed)


def _docs(parsed: argparse.Namespace) -> int:
    pages = {file.stem: file for file in sorted(DOCS.glob("*.md"))}
    if parsed.page is None:
        width = max(map(len, pages))
        titles = {name: read_text(file).splitlines()[0].removeprefix("# ") for name, file in pages.items()}
        sys.stdout.writelines(f"{name:{width}}  {title}\n" for name, title in titles.items())
    elif (file := pages.get(Path(parsed.page).stem)) is not None:
        sys.stdout.write(read_text(file))
    else:
        sys.stderr.write(f"{parsed.page}: no such page; {did_you_mean(parsed.page, pages)}\n")
        return WRONG_CONFIGURATION
    return 0


def _init(parsed: argparse.Namespace) -> int:
    folder = absolute_path(parsed.folder)
    try:
        shutil.copytree(STARTERS / parsed.recipe, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except (OSError, shutil.Error) as error:
        sys.stderr.write(f"{folder} cannot be written ({getattr(error, 'strerror', error)}); name a new folder\n")
        return WRONG_CONFIGURATION
    sys.stdout.write(f"{folder}: README.md says what is in it; start with\n  cd {parsed.folder}\n  roll-lite run --config-name my_run\n")
    return 0


def _data(parsed: argparse.Namespace) -> int:
    from roll_lite.data.preset_command import list_presets, prepare, show_preset

    if parsed.action == "list":
        return list_presets()
    if parsed.action == "show":
        return show_preset(parsed.preset)
    return prepare(parsed.preset, parsed.split, parsed.source, parsed.out)


def _variable(name: str) -> str:
    if name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here; export it and give its name alone")
    return name


def _number(least: int, most: float = math.inf) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text}: expected a whole number{f' from {least} to {most}' if most < math.inf else f', {least} or more'}"
            )
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
