"""Repair typer's script for zsh, which `fqvit --install-completion` writes."""

from __future__ import annotations

import importlib

# zsh runs the script when Tab is pressed for the first time. As typer writes it, it only defines the function, so the first Tab
# of every new shell would complete nothing.
CALL = """
[[ $zsh_eval_context[-1] == loadautofunc ]] && %(complete_func)s "$@"
"""


def repair_zsh_script() -> None:
    """Let the script complete when zsh loads it. Does nothing if typer has changed."""
    scripts: dict[str, str] = getattr(importlib.import_module("typer._completion_shared"), "_completion_scripts", {})
    if "loadautofunc" not in scripts.get("zsh", "loadautofunc"):
        scripts["zsh"] += CALL
