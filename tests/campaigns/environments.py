"""Virtual environments of other packages, made in build, without this package."""

import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from ..pages import REPOSITORY


@dataclass(frozen=True)
class Environment:
    """An environment and the commands that fill it.

    folder: of the environment, in build. pip: the commands.
    is_shared: whether it finds the packages of development, and its own before them.
    """

    folder: str
    pip: tuple[tuple[str, ...], ...]
    is_shared: bool = field(default=False, kw_only=True)

    def python(self) -> Path:
        """Return the Python of the environment, made if it isn't there."""
        environment = REPOSITORY / "build" / self.folder
        python, installed = environment / "bin" / "python", environment / "installed"
        pinned = " ".join(argument for command in self.pip for argument in command if "==" in argument)
        if not installed.exists() or installed.read_text(encoding="utf-8") != pinned:
            venv.create(environment, with_pip=not self.is_shared, clear=True)
            pip = [python, "-m", "pip"]
            if self.is_shared:
                share(environment)
                pip = [sys.executable, "-m", "pip", "--python", python]
            for command in self.pip:
                subprocess.run([*pip, "--quiet", *command], check=True, cwd=REPOSITORY)
            installed.write_text(pinned, encoding="utf-8")
        return python


def share(environment: Path) -> None:
    """Let an environment find the packages that are installed here; what is editable here, it does not find."""
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
