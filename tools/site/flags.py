"""Makes the page of settings: every flag of `quire serve`."""

from __future__ import annotations

from collections import defaultdict

from quire.configs.options import Option, all_options


def page() -> str:
    """Return the page, in Markdown."""
    sections: dict[str, list[Option]] = defaultdict(list)
    for option in all_options().values():
        sections[option.section].append(option)
    parts = [
        "# All settings\n\nEach flag is also a YAML key (`max_model_len`) and a variable (`QUIRE_MAX_MODEL_LEN`); see"
        " [settings.md](settings.md). Flags of other servers: [other-flags.md](other-flags.md).\n"
    ]
    for section, options in sections.items():
        parts.append(f"\n## {section}\n\n| flag | default | meaning |\n|---|---|---|\n")
        parts.extend(
            f"| {_anchor(option)}`{'`, `'.join(option.flags)}` | {_default(option)} | {_cell(option.help)} |\n"
            for option in options
        )
    return "".join(parts)


def _anchor(option: Option) -> str:
    return f'<a id="{option.flag[2:]}"></a>'


def _default(option: Option) -> str:
    return "" if option.default in (None, [], ()) else f"`{option.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
