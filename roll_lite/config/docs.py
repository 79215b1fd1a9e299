"""Writes docs/configuration.md from the schema: `python -m roll_lite.config.docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll_lite.config.problems import dotted
from roll_lite.config.schema.base import Section
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import sections, shape_of
from roll_lite.config.wording import field_type, in_words

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """# Configuration reference

Generated from `roll_lite/config/schema/` by `python -m roll_lite.config.docs`. Do not edit.

A configuration is a YAML file of yours, named by its path (with or without `.yaml`) or by its name in the folder `--config-path`, or one
of those that the package ships (`examples/configs`). It may build on others of its folder and on shipped ones; of two with the same name
yours is used, which is said. A shipped one builds on shipped ones only.

```yaml
defaults: [tiny_base, _self_]     # tiny_base.yaml first, then this file; without _self_ the file comes last as well
experiment: mine
domains:
  add: {share: 2}                 # mappings are merged, lists and values replaced
  make: {share: "${domains.add.share}"}
  repeat: null                    # removes an inherited entry, and any other inherited key that cannot itself be null
```

`???` stands for a value that has to be given, `${oc.env:NAME}` for one of the environment, which is never written down. A setting whose
name says that it is a secret (`api_key`, `token`, `password`) is written down as `???`, wherever a run writes its configuration: read
again, it has to be given. Where a section is chosen by its `name`, the name alone is enough: `strategy: sglang` sets `strategy.name`, and
drops the keys that only the former choice had, and the `args` of the former function. On the command line, with values in YAML:

| | |
|---|---|
| `a.b=1`, `a.b=[1,2]`, `a.b=null` | set; sections that do not exist are made |
| `a={x: 1}` | merge a mapping into a section |
| `actor_infer.strategy=sglang` | the same as `actor_infer.strategy.name=sglang` |
| `+a.b=1`, `++a.b=1` | the same as `a.b=1`, for those used to it |
| `~a.b` | delete |
| `a.text={prompt} =` | a setting that takes text keeps braces, brackets and colons |
| `trackers.0.name=jsonl` | an entry of a list |

With `-m`, a run's `seed=1,2 algorithm.policy_loss=ppo,gspo` is one run for every combination, one after the other, and a table at the end;
`seed=range(1,4)` and `seed=choice(1,2,3)` stand for their values.
As in Hydra, `-cn`, `-cp` and `--config-dir` are short for the options, and `--cfg job` only prints the configuration.

Relative paths count from the folder that the run is started in. Everything is checked before anything starts, and all mistakes are
reported together: `roll-lite check --config-name NAME [key=value ...]`. A section that is left out has its defaults.
"""


def render() -> str:
    """Markdown of the whole page."""
    places: dict[type[Section], list[str]] = {}
    for path, cls in sections():
        places.setdefault(cls, []).append(dotted(path))
    return "\n".join([INTRODUCTION, *(_section(cls, where) for cls, where in places.items())])


def _section(cls: type[Section], places: list[str]) -> str:
    lines = [f"## {cls.__name__}", ""]
    if cls is not RunConfig:
        lines += ["At " + ", ".join(f"`{place}`" for place in places) + ".", ""]
    if cls.__doc__ and cls.__doc__ != Section.__doc__:
        lines += [" ".join(cls.__doc__.split()), ""]
    lines += ["| field | type | default | |", "|---|---|---|---|"]
    for name, info in cls.model_fields.items():
        description = " ".join((info.description or "Selects this section.").split())
        cells = [f"`{name}`", _type(info), _default(info), description]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _type(info: FieldInfo) -> str:
    shape = shape_of(info.annotation)
    if not shape.variants:
        return in_words(field_type(info))
    links = " or ".join(f"[{variant.__name__}](#{variant.__name__.lower()})" for variant in shape.variants)
    if shape.container is None:
        return links
    return ("mapping of name to " if shape.container is dict else "list of ") + links


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_unset=True)
        return f"`{_text(changed)}`" if changed else "its defaults"
    if isinstance(value, list):
        return f"`{_text([item.model_dump(mode='json') if isinstance(item, BaseModel) else item for item in value])}`"
    return f"`{_text(value)}`"


def _text(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
