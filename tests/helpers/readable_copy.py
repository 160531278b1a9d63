"""A copy of the command and its Python that every user can read.

The checkout and the Python under test may be in a directory that only its owner can read, where
no other user can start anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALLED: Final = ("shmacc", "numpy", "posix_ipc", "ml_dtypes")
_NOT_NEEDED: Final = shutil.ignore_patterns("site-packages", "test", "config-*", "idlelib")
_START: Final = "import sys; from shmacc_inspect.start import main; sys.exit(main())"


@contextmanager
def command_for_everyone() -> Iterator[tuple[str, ...]]:
    """Yield the command that starts a copy of `shmacc-inspect` that everyone can read."""
    # In /tmp, as TMPDIR may be readable to this user only.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home, packages = Path(folder), Path(folder, "packages")
        python = shutil.copy(sys.executable, folder)
        standard = Path(sysconfig.get_path("stdlib"))
        shutil.copytree(standard, home / "lib" / standard.name, ignore=_NOT_NEEDED)
        library = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
        if library.suffix != ".a" and library.exists():
            shutil.copy(library, home / "lib")
        for distribution in _INSTALLED:
            _copy_installed(distribution, packages)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        search = (f"LD_LIBRARY_PATH={home}/lib", f"PYTHONHOME={home}", f"PYTHONPATH={packages}")
        yield ("env", *search, python, "-P", "-c", _START)


def _copy_installed(distribution: str, packages: Path) -> None:
    for file in metadata.files(distribution) or ():
        if ".." not in file.parts:  # only scripts in bin have such a path
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), packages / file)
