"""Installs the extension into the PostgreSQL that tools/pg-config names, or removes it.

The control file and scripts go to SHAREDIR/extension. The package and its pinned dependencies go
to SHAREDIR/pg_sluice/VERSION, the one directory PL/Python functions add to `sys.path`. A running
server may be importing from it, so it is built beside its place and exchanged in one step. Run this
with the Python that PL/Python uses: it compiles the byte code.
"""

import compileall
import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from script import ROOT, package_version

BUILD = ROOT / ".build"
REQUIREMENTS = ROOT / "requirements" / "server.txt"
RENAME_EXCHANGE = 2


def share_directory() -> Path:
    found = subprocess.run([ROOT / "tools" / "pg-config"], stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise SystemExit(found.returncode)
    share = subprocess.check_output([found.stdout.strip(), "--sharedir"], text=True).strip()
    return Path(os.environ.get("DESTDIR", "") + share)


def server_libraries() -> Path:
    """Download the pinned dependencies, once per content of requirements/server.txt."""
    target, stamp = BUILD / "server-libs", BUILD / "server-libs.txt"
    wanted = REQUIREMENTS.read_text()
    if target.is_dir() and stamp.exists() and stamp.read_text() == wanted:
        return target
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        venv.create(BUILD / "pip", with_pip=True, clear=True)
        python = BUILD / "pip" / "bin" / "python"
    BUILD.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--target", str(target)]
    pip += [
        "--only-binary",
        ":all:",
        "--no-deps",
        "--no-compile",
        "--requirement",
        str(REQUIREMENTS),
    ]
    subprocess.run(pip, check=True)
    stamp.write_text(wanted)
    return target


def exchange(fresh: Path, place: Path) -> None:
    """Put `fresh` at `place`; what was there, if anything, is then at `fresh`."""
    if not place.exists():
        fresh.rename(place)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd = -100
    with contextlib.suppress(AttributeError):  # a C library without renameat2
        if not libc.renameat2(at_cwd, bytes(fresh), at_cwd, bytes(place), RENAME_EXCHANGE):
            return
    old = place.with_name(place.name + ".old")
    place.rename(old)
    fresh.rename(place)
    old.rename(fresh)


def make_readable(tree: Path) -> None:
    """The server runs as another user, whatever umask and modes the checkout has."""
    for path in (tree, *tree.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def install_package(share: Path) -> None:
    place = share / "pg_sluice" / package_version()
    libraries = server_libraries()
    place.parent.mkdir(exist_ok=True)
    place.parent.chmod(0o755)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as temporary:
        fresh = Path(temporary) / "tree"
        ignore = shutil.ignore_patterns("__pycache__", "bin")
        shutil.copytree(libraries, fresh, ignore=ignore)
        shutil.copytree(ROOT / "python" / "pg_sluice", fresh / "pg_sluice", ignore=ignore)
        if not compileall.compile_dir(fresh, quiet=1, stripdir=str(fresh), prependdir=str(place)):
            raise SystemExit("the package does not compile")
        make_readable(fresh)
        exchange(fresh, place)
    print(f"installed {place}")


def install_scripts(share: Path) -> None:
    """Scripts before the control file, each replaced in one step."""
    extension = share / "extension"
    extension.mkdir(parents=True, exist_ok=True)
    sources = [
        *sorted((ROOT / "extension").glob("pg_sluice--*.sql")),
        ROOT / "extension/pg_sluice.control",
    ]
    for source in sources:
        fresh = extension / f".{source.name}.new"
        shutil.copyfile(source, fresh)
        fresh.chmod(0o644)
        fresh.replace(extension / source.name)
        print(f"installed {extension / source.name}")


def uninstall(share: Path) -> None:
    for path in [
        share / "extension" / "pg_sluice.control",
        *(share / "extension").glob("pg_sluice--*.sql"),
        share / "pg_sluice",
    ]:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        else:
            continue
        print(f"removed {path}")


def main(command: str) -> None:
    share = share_directory()
    os.umask(0o022)
    try:
        if command == "install":
            share.mkdir(parents=True, exist_ok=True)
            install_package(share)
            install_scripts(share)
        else:
            uninstall(share)
    except PermissionError as error:
        raise SystemExit(f"{error}\nRun it as a user who may write to {share}.") from None


if __name__ == "__main__":
    if sys.argv[1:] not in (["install"], ["uninstall"]):
        raise SystemExit("usage: install.py install|uninstall")
    main(sys.argv[1])
