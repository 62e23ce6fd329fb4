"""Builds the wheel, installs it into an environment of its own, and tries it there. Run by `make wheel`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.project.pages import fits, follow

ROOT = Path(__file__).parent.parent

# Neither what others release today nor a slow network decides whether our wheel works.
CONSTRAINED = ("--constraint", str(ROOT / "constraints.txt"))
PATIENT = {"PIP_RETRIES": "10", "PIP_DEFAULT_TIMEOUT": "60"}

CORE = """
import importlib.resources
import sys
from onefold import Guard

assert "site-packages" in sys.modules["onefold"].__file__, sys.modules["onefold"].__file__
assert importlib.resources.files("onefold").joinpath("py.typed").is_file()
ran = []
guard = Guard("memory:")
first = guard.run("charge", "pay_1", lambda: ran.append(1) or "receipt")
again = guard.run("charge", "pay_1", lambda: ran.append(1) or "receipt")
assert (first.replayed, again.replayed, again.value, len(ran)) == (False, True, "receipt", 1)
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="onefold-wheel-") as folder:
        home = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", str(home), str(ROOT))
        wheel = next(home.glob("*.whl"))
        venv.create(home / "env", with_pip=True)
        python = str(home / "env" / "bin" / "python")

        run(python, "-m", "pip", "install", "--quiet", *CONSTRAINED, str(wheel))
        run(python, "-c", CORE)
        installed = output(python, "-m", "pip", "list", "--format", "freeze").split()
        names = {line.partition("==")[0] for line in installed} - {"pip", "setuptools"}
        assert names == {"onefold", "msgspec"}, names
        bare = subprocess.run([home / "env/bin/onefold"], capture_output=True, text=True, check=False)
        assert "onefold[cli]" in bare.stderr, bare
        assert "Traceback" not in bare.stderr, bare

        first_minute(home, wheel)

        run(python, "-m", "pip", "install", "--quiet", *CONSTRAINED, f"{wheel}[all]", "pytest")
        assert "onefold" in output(str(home / "env/bin/onefold"), "--version")
        test = home / "test_it.py"
        test.write_text("def test_it(onefold_guard):\n    assert onefold_guard.run('a', 'k', lambda: 1).value == 1\n")
        run(python, "-m", "pytest", "-q", str(test), cwd=home)
    sys.stdout.write("the wheel works: core alone, by the README, with its extras, and as a pytest plugin\n")


def first_minute(home: Path, wheel: Path) -> None:
    """Follow the README in an empty folder and an environment without anything; its `onefold` is this wheel."""
    folder, environment = home / "minute", home / "minute-env"
    folder.mkdir()
    venv.create(environment, with_pip=True)
    pinned = home / "constraints.txt"
    pinned.write_text(f"{(ROOT / 'constraints.txt').read_text()}onefold=={wheel.name.split('-')[1]}\n")
    settings = {
        **PATIENT,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(pinned),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": f"{wheel.parent} {os.environ.get('PIP_FIND_LINKS', '')}",
        "PIP_QUIET": "2",
    }

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = list(follow(page, folder, settings))

    said = (folder / "stderr").read_text(encoding="utf-8")
    assert [one for one in printed if one.expected and not fits(one)] == [], said
    assert "with the guard every effect happened once" in printed[-1].actual, said


def run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **PATIENT})


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
