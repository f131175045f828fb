"""The parser of the command line: errors that name the nearest word, and completion in shells."""

import argparse
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NoReturn

CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)'")
NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: ('[^']*')")
COMPLETION = """_hf_hyperconn() {{
    local words=
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
        *) case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD]}}" in
{options}
            esac ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands} --help --version"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hf_hyperconn hf-hyperconn"""
SHELLS = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}


class Parser(argparse.ArgumentParser):
    """A parser of the command line or of one command, whose errors are one line."""

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        self._fill_last(parsed, unknown)
        if unknown:
            hints = "".join(self._hint(word.partition("=")[0]) for word in unknown if word.startswith("-"))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if wrong := CHOICE.match(message):
            choices = next(map(list, (a.choices for a in self._actions if a.choices and wrong[1] in names_of(a))))
            hint = did_you_mean(wrong[2].lower(), choices)
            message = f"{wrong[1]} must be {', '.join(choices[:-1])} or {choices[-1]} (got {wrong[2]!r}){hint}"
        elif wrong := NUMBER.match(message):
            message = f"{wrong[1]} must be a {'whole ' * (wrong[2] == 'int')}number (got {wrong[3]})"
        message = re.sub(r"^argument (\S+): must", r"\1 must", message)
        end = "" if message.endswith("?") else f". Run {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}{end}\n")

    def _fill_last(self, parsed: argparse.Namespace, unknown: list[str]) -> None:
        """Give an optional argument its word behind options, which argparse leaves out, as in `MODEL -n 4 OUT`."""
        for action in self._actions:
            is_left_out = action.nargs == "?" and not action.option_strings and getattr(parsed, action.dest) is None
            if is_left_out and unknown and not unknown[0].startswith("-"):
                setattr(parsed, action.dest, unknown.pop(0))

    def _hint(self, option: str) -> str:
        """Return the nearest option, or the place of an argument that was given as an option."""
        for action in self._actions:
            if not action.option_strings and action.dest == option.lstrip("-"):
                return f". Give {action.metavar} without an option"
        return did_you_mean(option, [known for action in self._actions for known in action.option_strings])


def names_of(action: argparse.Action) -> tuple[str, ...]:
    """Return the names that argparse gives an argument in its messages."""
    return ("/".join(action.option_strings), str(action.metavar), action.dest)


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
            if action.choices:  # of an option, or of the argument after the command
                places = "|".join(f'"{name} {before}"' for before in action.option_strings or [name])
                choices.append(f'        {places}) words="{" ".join(map(str, action.choices))}" ;;')
        words = " ".join(option for action in parser._actions for option in action.option_strings)
        options.append(f'            "{name} -"*) words="{words}" ;;')
    text = COMPLETION.format(choices="\n".join(choices), options="\n".join(options), commands=" ".join(commands))
    return SHELLS[shell] + text
