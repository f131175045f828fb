"""Virtual environments of other packages, made in build, without this package."""

import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from ..pages import REPOSITORY


@dataclass(frozen=True)
class Environment:
    """An environment and the commands that fill it.

    folder: of the environment, in build. pip: the commands.
    """

    folder: str
    pip: tuple[tuple[str, ...], ...]

    def python(self) -> Path:
        """Return the Python of the environment, made if it isn't there."""
        environment = REPOSITORY / "build" / self.folder
        python, installed = environment / "bin" / "python", environment / "installed"
        pinned = " ".join(argument for command in self.pip for argument in command if "==" in argument)
        if not installed.exists() or installed.read_text(encoding="utf-8") != pinned:
            venv.create(environment, with_pip=True, clear=True)
            for command in self.pip:
                subprocess.run([python, "-m", "pip", "--quiet", *command], check=True)
            installed.write_text(pinned, encoding="utf-8")
        return python
