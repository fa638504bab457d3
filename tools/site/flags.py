"""The page of settings: every flag of `quire serve`, and flags of other servers with what does their work here."""

from __future__ import annotations

from collections import defaultdict

from quire.configs.foreign_settings import BY_SERVER
from quire.configs.options import Option, all_options


def page() -> str:
    """The page, in Markdown."""
    sections: dict[str, list[Option]] = defaultdict(list)
    for option in all_options().values():
        sections[option.section].append(option)
    parts = [
        "# All settings\n\nEach flag is also a YAML key (`max_model_len`) and a variable (`QUIRE_MAX_MODEL_LEN`); see"
        " [settings.md](settings.md).\n"
    ]
    for section, options in sections.items():
        parts.append(f"\n## {section}\n\n| flag | default | meaning |\n|---|---|---|\n")
        parts.extend(
            f"| `{'`, `'.join(option.flags)}` | {_default(option)} | {_cell(option.help)} |\n" for option in options
        )
    for server, settings in BY_SERVER.items():
        parts.append(f"\n## Flags of {server}\n\n| there | here |\n|---|---|\n")
        parts.extend(f"| `{_spelled(name)}` | {_cell(advice)} |\n" for name, advice in settings.items())
    return "".join(parts)


def _default(option: Option) -> str:
    return "" if option.default in (None, [], ()) else f"`{option.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _spelled(name: str) -> str:
    return f"-{name}" if len(name) <= 3 else "--" + name.replace("_", "-")
