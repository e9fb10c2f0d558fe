"""Group the commands in `fqvit --help` by purpose, and complete names of recipes and models in a shell."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

# Every command belongs to one group; a test checks this.
GROUPS = {
    "Quantize a model": ("models", "check", "quantize"),
    "Use a program": ("classify", "embed", "search", "serve", "web"),
    "Measure and explain": ("eval", "compare", "report", "bench", "inspect"),
    "Deploy and publish": ("export", "card"),
    "Object detectors": ("detect",),
    "Evaluation of the paper": ("table", "ablate", "sweep-k", "bitops"),
    "Installation": ("doctor",),
}


class GroupedCommands(TyperGroup):
    """The commands of `fqvit`, listed by group. rich would do this too, but importing it doubles the time of `--help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        grouped = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in grouped)
        for title, names in {**GROUPS, "Others": others}.items():
            shown = [(name, self.commands[name]) for name in names if name in self.commands and not self.commands[name].hidden]
            if shown:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), command.get_short_help_str(limit)) for name, command in shown])


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes that start with the text. Files are completed by the shell."""
    from fqvit.quant.recipe import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the names of models that start with the text. Files and folders are completed by the shell."""
    from fqvit.models import zoo

    return [name for name in zoo.BY_NAME if name.startswith(incomplete)]
