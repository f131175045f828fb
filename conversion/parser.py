"""The parser of the command line: errors that name the nearest word, and completion in shells."""

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NoReturn

COMPLETION = """_hf_hyperconn() {{
    local words=
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
        *) case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD]}}" in
{options}
            esac ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hf_hyperconn hf-hyperconn"""
SHELLS = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}


class Parser(argparse.ArgumentParser):
    """A parser of the command line or of one command, whose errors show its own usage."""

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            hints = "".join(did_you_mean(word.partition("=")[0], known) for word in unknown if word.startswith("-"))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '([^']*)'", message):
            choices = [str(choice) for action in self._actions for choice in action.choices or ()]
            message += did_you_mean(wrong[1], choices)
        super().error(message)


def did_you_mean(word: str, known: list[str]) -> str:
    """Return a question that names the nearest known word; "" where none is near."""
    return "".join(f". Did you mean {near}?" for near in get_close_matches(word, known, n=1))


def completion(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the text that lets a shell complete commands, options and choices, and files elsewhere.

    shell: a key of `SHELLS`; zsh runs bash's text.
    commands: the parser of each command, by its name.
    """
    choices, options = [], []
    for name, parser in commands.items():
        for action in parser._actions:
            if action.choices and action.option_strings:
                places = "|".join(f'"{name} {option}"' for option in action.option_strings)
                choices.append(f'        {places}) words="{" ".join(map(str, action.choices))}" ;;')
        words = " ".join(option for action in parser._actions for option in action.option_strings)
        options.append(f'            "{name} -"*) words="{words}" ;;')
    text = COMPLETION.format(choices="\n".join(choices), options="\n".join(options), commands=" ".join(commands))
    return SHELLS[shell] + text
